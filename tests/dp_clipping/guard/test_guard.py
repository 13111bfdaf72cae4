"""When it is looked for where the samples are, and with how many of them."""

import copy

import pytest
import torch
from torch import nn

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.capture.samples.batch import Batch
from dp_clipping.guard.guard import TOLD_AT, LayoutDiscovery
from tests.dp_clipping.conftest import count_calls, private, private_loss
from tests.support import zoo


def discovery() -> tuple[LayoutDiscovery, nn.Module]:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    model = private(network, "bookkeeping")
    return LayoutDiscovery(model.capture, True), network


def batch_of(count: int) -> Batch:
    return Batch((torch.randn(count, 3),), {}, True)


@pytest.mark.parametrize(
    ("counts", "looks"),
    [((4, 4, 3, 5), (1, 1, 1, 1)), ((1, 1, 4, 4, 1), (1, 1, 2, 2, 2))],
    ids=["once", "again after one sample"],
)
def test_how_often_it_looks(counts, looks):
    found, _ = discovery()
    found.look = count_calls(found.look)
    for count, expected in zip(counts, looks, strict=True):
        found.ensure(batch_of(count))
        assert found.look.count == expected


def test_it_looks_again_when_told():
    found, _ = discovery()
    found.ensure(batch_of(4))
    found.look = count_calls(found.look)
    found.forget()
    assert found.ensure(batch_of(4)) is not None
    assert found.look.count == 1


def test_equal_samples_are_told_of_once(recwarn):
    """They cannot be told apart, so every step checks."""
    found, _ = discovery()
    for _ in range(TOLD_AT - 1):
        found.ensure(Batch((torch.zeros(4, 3),), {}, True))
    assert not recwarn
    for _ in range(TOLD_AT):
        found.ensure(Batch((torch.zeros(4, 3),), {}, True))
    (told,) = recwarn
    assert "give data that differ" in str(told.message)


def tensor_of(network: nn.Module, output: str = "last_hidden_state") -> nn.Module:
    """A network of Hugging Face whose output is a tensor."""
    return zoo.Net(lambda net, x: getattr(net.network(x), output), network=network)


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def hugging_face(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Returns a network, and its inputs of four samples."""
    hf = pytest.importorskip("transformers")
    ids, images = torch.randint(1, 20, (4, 6)), torch.randn(4, 3, 16, 16)
    if name == "t5":
        config = hf.T5Config(
            vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, dropout_rate=0.0
        )
        return tensor_of(hf.T5EncoderModel(config)), ids
    if name == "swin":
        config = hf.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4,
            num_labels=3, drop_path_rate=0.0,
        )  # fmt: skip
        return tensor_of(hf.SwinForImageClassification(config), "logits"), images
    if name == "deberta":
        config = hf.DebertaV2Config(
            vocab_size=20, relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True,
            max_position_embeddings=8, **SIZES,
        )  # fmt: skip
        return tensor_of(hf.DebertaV2Model(config)), ids
    config = hf.PerceiverConfig(
        vocab_size=20, num_latents=3, d_latents=8, d_model=8, num_blocks=1, num_labels=3,
        num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2,
        max_position_embeddings=8,
    )  # fmt: skip
    return tensor_of(hf.PerceiverForSequenceClassification(config), "logits"), ids


@pytest.mark.parametrize(
    ("name", "caller", "is_apart"),
    [
        ("t5", "network.encoder.block.0.layer.0.SelfAttention", True),
        pytest.param(
            "swin", "network.swin.encoder.layers.0.blocks.0.attention", True, marks=pytest.mark.slow
        ),
        ("deberta", "network.encoder", False),
        ("perceiver", "network.perceiver.embeddings", False),  # no argument has rows for it
    ],
)
def test_a_caller_computes_with_copies(name, caller, is_apart):
    network, inputs = hugging_face(name)
    network = zoo.seeded(lambda: network)
    without_dropout(network)
    batch = (inputs, torch.zeros(4))
    expected = oracle.norms(oracle.per_sample_gradients(copy.deepcopy(network), batch, loss))
    model = private(network)
    private_loss(model, batch, loss).backward()
    torch.testing.assert_close(
        model.per_sample_gradient_norms.double(), expected, rtol=1e-4, atol=0
    )
    state = {handle.name: handle for handle in model.capture.handles}[caller]
    assert (state.kind, state.children_apart) == ("vectorized", is_apart)


def without_dropout(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    outputs = outputs.flatten(1)
    weights = torch.randn(outputs.shape[1], generator=draw, dtype=torch.float64)
    return outputs.double() @ weights


def masked(net, x, mask=None):
    y = x * net.scale
    return y if mask is None else y * mask[..., None]


def leaves_out(net, x, mask):
    """Leaves a mask out where nothing is padded, as Hugging Face's models do."""
    return net.inner(x) if mask.all() else net.inner(x, mask)


@pytest.mark.parametrize("padded", range(4))
def test_a_mask_that_is_there_for_some_samples_only(padded):
    """Whichever sample is padded, one of the first ones among others."""
    inner = zoo.Net(masked, scale=nn.Parameter(torch.rand(3)))
    network = zoo.Net(leaves_out, inner=inner)
    model = private(network, "bookkeeping")
    found = LayoutDiscovery(model.capture, True)
    mask = torch.ones(4, 5)
    mask[padded, 3:] = 0
    batch = Batch((torch.randn(4, 5, 3), mask), {}, True)
    found.ensure(batch)
    assert found.layouts_of(network(*batch.args))[0].kind == "dimension"
