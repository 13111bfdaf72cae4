"""Sharded networks begin as one process does; steps of them are in tests/dp_clipping/ranks."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ddp_by_hand.lm.layout import whole
from ddp_by_hand.lm.model import ModelConfig, Transformer, forward_loss
from ddp_by_hand.lm.parallel import DATA, TENSOR, materialize, parallelize, plan_of, shard_fully
from ddp_by_hand.lm.rank_pool import Context
from tests.support.meshes import square
from tests.support.on_ranks import on_ranks

ODD = ModelConfig(vocab_size=37, d_model=24, num_layers=2, num_heads=4, d_ff=20, context_length=11)


def mesh_of(context: Context, *axes: str) -> DeviceMesh:
    """One axis over the context's ranks, or two of two ranks each."""
    if len(axes) == 1:
        return DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=axes)
    return square(*axes)


def make(config=ODD) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(config).double()


def batches(ranks: int, size: int = 2) -> list:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(ODD.vocab_size, (ranks, size, 12), generator=draw)
    return [(x[:, :-1], x[:, 1:]) for x in tokens]


@on_ranks(2)
def test_mixed_precision(context: Context) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    network = make().float()
    shard_fully(network, mesh_of(context, DATA), mixed_precision=policy)
    (batch, *_) = batches(1)
    assert network(batch[0]).dtype == torch.bfloat16
    forward_loss(network, batch).backward()
    assert network.head.weight.grad.dtype == torch.float32


def from_meta(context: Context, axes: tuple[str, ...]) -> None:
    expected = Transformer(ODD)
    torch.manual_seed(0)
    expected.reset_parameters()
    with torch.device("meta"):
        network = Transformer(ODD)
    parallelize(network, mesh_of(context, *axes))
    torch.manual_seed(0)
    materialize(network, "cpu")
    for name, parameter in expected.named_parameters():
        assert torch.equal(whole(network.get_parameter(name)), parameter), name


@pytest.mark.parametrize("axes", [(DATA,), (TENSOR,), (DATA, TENSOR)], ids="-".join)
def test_a_network_from_the_meta_device_is_that_of_one_process(cpu_ranks, axes):
    cpu_ranks.run(2 * len(axes), from_meta, axes)


needs_transformers = pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")


def llama(kind: str, **changes) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "num_labels": 3, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.LlamaConfig(**(sizes | changes))
    return getattr(transformers, kind)(config)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
        ("LlamaForSequenceClassification", {}),
    ],
)
@needs_transformers
@on_ranks(2)
def test_llama(context: Context, kind: str, changes: dict) -> None:
    expected = llama(kind, **changes).double()
    network = parallelize(llama(kind, **changes).double(), mesh_of(context, TENSOR))
    assert network.model.layers[0].self_attn.k_proj.weight.to_local().shape == (6, 24)
    ((tokens, _),) = batches(1)
    for one in (expected, network):
        F.cross_entropy(
            one(tokens).logits.flatten(0, -2),
            torch.arange(tokens.numel())[: 2 if "Classification" in kind else None] % 3,
        ).backward()
    torch.testing.assert_close(network(tokens).logits, expected(tokens).logits)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(whole(network.get_parameter(name).grad), parameter.grad)


def llama_from_meta(context: Context, axes: tuple[str, ...]) -> None:
    """The library's own initialisation, which also fills buffers."""
    expected = llama("LlamaForCausalLM", pad_token_id=None)
    with torch.device("meta"):
        network = llama("LlamaForCausalLM", pad_token_id=None)
    parallelize(network, mesh_of(context, *axes))
    for one, fill in ((expected, lambda n, reset: reset()), (network, materialize_on_cpu)):
        torch.manual_seed(0)
        for parameter in one.parameters():
            parameter._is_hf_initialized = False
        for module in one.modules():
            module._is_hf_initialized = False
        fill(one, one.init_weights)
    for name, parameter in expected.named_parameters():
        assert torch.equal(whole(network.get_parameter(name)), parameter), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(network.get_buffer(name), buffer), name


def materialize_on_cpu(network: nn.Module, reset) -> None:
    materialize(network, "cpu", reset)


@pytest.mark.parametrize("axes", [(DATA,), (TENSOR,), (DATA, TENSOR)], ids="-".join)
@needs_transformers
def test_llama_from_the_meta_device(cpu_ranks, axes):
    cpu_ranks.run(2 * len(axes), llama_from_meta, axes)


@on_ranks(2)
def test_what_is_refused(context: Context) -> None:
    with pytest.raises(ValueError, match="axes \\('rows',\\)"):
        parallelize(make(), mesh_of(context, "rows"))
    with pytest.raises(ValueError, match="choose one of block, root"):
        parallelize(make(), mesh_of(context, DATA), wrap="layer")
    with pytest.raises(ValueError, match="no tensor-parallel plan is known for Linear"):
        parallelize(nn.Linear(2, 2), mesh_of(context, TENSOR))


@pytest.mark.parametrize(("ranks", "name"), [(3, "num_heads is 4"), (4, None), (8, "num_heads")])
def test_heads_and_units_must_divide(ranks, name):
    if name is None:
        assert plan_of(make(), ranks)
        return
    with pytest.raises(ValueError, match=name):
        plan_of(make(), ranks)
