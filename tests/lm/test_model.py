import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.utils import _apply_to_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddp_by_hand.lm.model import (
    PRESETS,
    Attention,
    ModelConfig,
    Rotation,
    Transformer,
    flops_per_token,
    forward_loss,
)

ODD = ModelConfig(vocab_size=37, d_model=30, num_layers=3, num_heads=5, d_ff=13, context_length=11)
CPU = torch.device("cpu")


def make(config=ODD, seed=0, **changes):
    torch.manual_seed(seed)
    return Transformer(dataclasses.replace(config, **changes))


def make_batch(batch_size=3, length=11, vocab_size=ODD.vocab_size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (batch_size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model, batch):
    model.zero_grad()
    forward_loss(model, batch).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_neither_later_tokens_nor_other_samples_change_logits():
    model, (tokens, _) = make(), make_batch()
    changed = tokens.clone()
    changed[:, 6] = (tokens[:, 6] + 1) % 37
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert (after[:, 6:] - before[:, 6:]).abs().amax(dim=(0, 2)).min() > 1e-5
    model, (tokens, _) = make(), make_batch()
    torch.testing.assert_close(model(tokens)[:1], model(tokens[:1]))


def textbook_attention(attention, x):
    """One head and one query at a time; Su et al.'s turns are products with e^(i t theta)."""
    (batch_size, length, width), size = x.shape, attention.head_size
    result = torch.zeros_like(x)
    theta = 10_000 ** (-torch.arange(size // 2) / (size // 2))
    turn = torch.polar(torch.ones(length, size // 2), torch.arange(length)[:, None] * theta)
    for b, start in itertools.product(range(batch_size), range(0, width, size)):
        rows = slice(start, start + size)
        projections = attention.query, attention.key, attention.value
        query, key, value = (x[b] @ linear.weight[rows].T for linear in projections)
        query, key = (torch.complex(*h.chunk(2, dim=1)) * turn for h in (query, key))
        for t in range(length):
            scores = (query[t] * key[: t + 1].conj()).real.sum(dim=1) / size**0.5
            result[b, t, rows] = scores.softmax(dim=0) @ value[: t + 1]
    return result @ attention.output.weight.T


def test_attention_is_the_textbook_one():
    attention = Attention(ODD)
    x = torch.randn(2, 11, 30, generator=torch.Generator().manual_seed(0)) * 4
    expected = textbook_attention(attention, x)
    torch.testing.assert_close(attention(x, Rotation(11, 6, CPU)), expected, atol=1e-5, rtol=1e-4)


def test_rotation_keeps_float32_tables_in_a_bfloat16_model():
    rotation = Rotation(300, 8, CPU)
    assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotation.turn(x)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotation.turn(x.float()).bfloat16())
    # its mixed precision casts through this helper, which looks into containers, dataclasses
    rotation = Rotation(7, 8, CPU)
    (passed,) = _apply_to_tensors(torch.Tensor.bfloat16, (rotation,))
    assert passed.cos.dtype == passed.sin.dtype == torch.float32


def test_tied_weights_share_storage_and_there_are_no_buffers():
    tied, untied = make(tie_embeddings=True), make()
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight.data_ptr() != untied.token_embedding.weight.data_ptr()
    count = [sum(p.numel() for p in model.parameters()) for model in (untied, tied)]
    assert count[0] - count[1] == 37 * 30
    model = make()
    model(make_batch()[0])
    assert list(model.buffers()) == []
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("tied", [False, True])
def test_initial_scale(tied):
    model = make(PRESETS["laptop"], tie_embeddings=tied)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
            continue
        residual = name.endswith(("output.weight", "down.weight"))
        expected = 0.02 / math.sqrt(8) if residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(parameter.mean().item()) < expected / 20, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_is_the_mean_cross_entropy_of_any_callable(dtype):
    logits = torch.randn(3, 11, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs, targets = make_batch()
    loss = forward_loss(lambda tokens: logits if tokens is inputs else None, (inputs, targets))
    chosen = F.log_softmax(logits.double(), dim=-1).gather(2, targets[..., None])
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_stays_near_float32(autocast):
    model, batch = make(), make_batch()
    expected, expected_loss = gradients(model, batch), forward_loss(model, batch)
    model = model if autocast else model.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = forward_loss(model, batch)
    model.zero_grad()
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-2)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == (torch.float32 if autocast else torch.bfloat16)
        difference = (parameter.grad.double() - expected[name].double()).norm()
        assert difference < 0.05 * expected[name].norm(), name


def test_blocks_compile_whole_into_one_graph():
    """The captured graphs are run as they are: no code generation, which takes a minute."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model, batch = make(), make_batch()
    expected = gradients(model, batch)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    for _ in range(2):
        for name, gradient in gradients(model, batch).items():
            torch.testing.assert_close(gradient, expected[name])
    assert len(graphs) == 1


def test_preset_counts():
    with torch.device("meta"):
        models = {name: Transformer(config) for name, config in PRESETS.items()}
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert list(counts) == ["laptop", "small", "730m", "1.2b"]
    assert list(counts.values()) == [1_115_264, 85_347_072, 738_248_704, 1_204_881_408]


def test_flops_agree_with_the_counter_of_torch():
    """It sees both products of attention in full; a backward costs two forwards."""
    model, (tokens, _) = make(), make_batch()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    assert counter.get_total_flops() * 3 == flops_per_token(ODD) * tokens.numel()
    assert flops_per_token(dataclasses.replace(ODD, tie_embeddings=True)) == flops_per_token(ODD)


SIZES = ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "context_length")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({name: 0}, f"{name} is 0: give") for name in SIZES),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"d_ff": 2.5}, "d_ff is 2.5"),
        ({"num_heads": 3}, "num_heads is 3, which does not divide d_model 128: choose"),
        ({"d_model": 12}, "gives heads of odd size 3"),
    ],
)
def test_impossible_sizes_are_named(changes, named):
    with pytest.raises(ValueError) as caught:
        ModelConfig(**changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
