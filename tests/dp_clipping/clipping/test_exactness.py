"""Rounding is part of the guarantee: one sample's contribution, measured, in every dtype and mode.

`contribution` is ‖param.grad‖ of a batch of one before noise: a float32 tensor, normed in float64.
"""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import (
    MODES,
    assert_close,
    clipped_sums,
    gradients_of,
    private,
    private_loss,
    unchecked,
)
from tests.support import zoo

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

ABOVE = 1 + 1e-6
BELOW = {torch.float32: 1 - 1e-4, torch.bfloat16: 1 - 1e-2, torch.float16: 1 - 1e-2}
THRESHOLDS = (0.3, 1 - 1e-6, 1 + 1e-6, 3.0)  # in units of the sample's norm

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", list(BELOW), ids=lambda d: str(d).split(".")[1])


def true_norm(batch: oracle.Batch) -> float:
    """‖Σ_t y_t x_tᵀ‖ of a batch of one for `zoo.product`, in float64."""
    x, y = (tensor[0].double().reshape(-1, tensor.shape[-1]) for tensor in batch)
    return float((y.T @ x).norm())


def total_norm(sums: dict[str, Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in sums.values()]).norm())


def contribution(
    mode: str, dtype: torch.dtype, batch: oracle.Batch, limit: float, **options
) -> float:
    p, d = batch[0].shape[-1], batch[1].shape[-1]
    model = unchecked(zoo.linear(p, d).to(dtype), mode, limit, **options)
    sums = clipped_sums(model, oracle.move(batch, dtype=dtype))
    assert all(g.dtype == torch.float32 for g in sums.values())
    return total_norm(sums)


def one_sample(length: int, p: int, d: int, dtype: torch.dtype) -> oracle.Batch:
    batch = zoo.numbers(1, length, p, out=(length, d))
    return oracle.move(batch, dtype=dtype)


# T·(d + p) is below p·d for some, so that factors are kept, and above for others: dense gradients.
SHAPES = [
    (1, 8, 6),
    (1, 96, 80),
    (16, 8, 6),
    (16, 96, 80),
    (64, 8, 6),
    (64, 96, 80),
    (64, 160, 192),
]
SHAPES += [(257, 8, 6), (257, 7, 130), (257, 640, 576)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_mode
@every_dtype
def test_ordinary_tokens(shape, mode, dtype):
    batch = one_sample(*shape, dtype)
    norm = true_norm(batch)
    for factor in THRESHOLDS:
        limit = factor * norm
        found = contribution(mode, dtype, batch, limit)
        assert found <= limit * ABOVE
        assert found >= min(limit, norm) * BELOW[dtype]


@pytest.mark.parametrize("function", ["abadi", "automatic"])
@every_mode
@every_dtype
def test_other_clipping(function, mode, dtype):
    batch = one_sample(16, 8, 6, dtype)
    norm = true_norm(batch)
    for clipping in ("flat", "per_layer"):
        found = contribution(
            mode, dtype, batch, 0.3 * norm, clipping=clipping, clipping_function=function
        )
        assert found <= 0.3 * norm * ABOVE
        assert found >= 0.3 * norm * norm / (norm + 0.01) * BELOW[dtype]


@pytest.mark.parametrize("eps", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("shape", [(16, 8, 6), (64, 96, 80), (64, 160, 192)], ids=str)
@every_mode
@every_dtype
def test_cancelling_tokens(eps, shape, mode, dtype):
    length, p, d = shape
    batch = zoo.cancelling_tokens(1, length, p, d, eps, dtype)
    norm = true_norm(batch)
    if norm == 0:
        assert contribution(mode, dtype, batch, 1.0) <= 1
        return
    for factor in THRESHOLDS:
        limit = factor * norm
        assert contribution(mode, dtype, batch, limit) <= limit * ABOVE


@every_mode
@every_dtype
def test_a_pair_of_huge_tokens_that_cancel(mode, dtype):
    """Beside ordinary ones: what remains is as small as the pair's rounding."""
    x, y = one_sample(16, 96, 80, dtype)
    x, y = x.clone(), y.clone()
    x[:, 0] *= 1024
    x[:, 7], y[:, 7] = -x[:, 0], y[:, 0]
    norm = true_norm((x, y))
    for factor in THRESHOLDS:
        assert contribution(mode, dtype, (x, y), factor * norm) <= factor * norm * ABOVE


@pytest.mark.parametrize("shape", [(16, 8, 6), (1, 8, 6), (4, 96, 80)], ids=str)
@every_mode
@every_dtype
def test_large_activations(shape, mode, dtype):
    """Gradients may be larger than float16's largest number: they are clipped, not dropped."""
    batch = oracle.move(zoo.large_activations(1, *shape), dtype=dtype)
    norm = true_norm(batch)
    for factor in THRESHOLDS:
        limit = factor * norm
        found = contribution(mode, dtype, batch, limit)
        assert found <= limit * ABOVE
        assert found >= min(limit, norm) * BELOW[dtype]


NETWORKS = ["mlp", "tokens", "transformer", "transformer_tied", "same_weight", "reused"]
NETWORKS += ["flattened", "embedding", "padding_idx_tied", "positions_batch_of_one", "layer_norm"]
NETWORKS += ["rms_norm", "conv2d", "group_norm"]


@pytest.mark.parametrize("case", zoo.parameters(*NETWORKS))
@every_mode
@every_dtype
def test_whole_networks(case, mode, dtype):
    """What is summed has the norm that was measured, over all parameters together."""
    batch = oracle.move(case.batch(1), dtype=dtype)
    model = unchecked(case.build().to(dtype), mode, 1e30)
    unclipped = total_norm(clipped_sums(model, batch, case.per_sample_loss))
    assert float(model.per_sample_gradient_norms) == pytest.approx(unclipped, rel=1e-4)
    for factor in THRESHOLDS:
        limit = factor * unclipped
        model.thresholds.set(limit)
        found = total_norm(clipped_sums(model, batch, case.per_sample_loss))
        assert found <= limit * ABOVE
        assert found >= min(limit, unclipped) * BELOW[dtype]


@every_mode
@every_dtype
def test_repeated_tokens_that_cancel_in_an_embedding(mode, dtype):
    net = zoo.seeded(lambda: nn.Embedding(5, 8)).to(dtype)
    _, half = zoo.cancelling_tokens(1, 64, 8, 8, dtype=dtype)
    y = torch.cat([half, -half * (1 + 2.0**-7)], dim=1).to(dtype)
    ids = torch.arange(64).remainder(5).repeat(2)[None]
    for limit in (1e-3, 1e-2, 1.0):
        model = unchecked(net, mode, limit)
        assert total_norm(clipped_sums(model, (ids, y))) <= limit * ABOVE
        model.to_standard_module()


# Samples whose gradient is not finite


def losses_times(model, case, batch, factors: Tensor):
    return private_loss(model, batch, case.per_sample_loss) * factors


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", ["tokens", "mlp", "reused", "conv2d", "layer_norm", "same_weight"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@every_mode
def test_a_poisoned_sample_is_as_if_it_were_not_there(value, name, clipping, mode):
    case = zoo.BY_NAME[name]
    poisoned = zoo.poisoned_sample(case.batch(4), 2, value)
    others = oracle.pick(case.batch(4), [0, 1, 3])
    model = unchecked(case.build(), mode, 2.0, clipping)
    sums = clipped_sums(model, poisoned, case.per_sample_loss)
    assert model.nonfinite_samples == 1
    norms = model.per_sample_gradient_norms
    assert not norms[2].isfinite()
    expected = clipped_sums(model, others, case.per_sample_loss)
    assert model.nonfinite_samples == 0
    torch.testing.assert_close(norms[[0, 1, 3]], model.per_sample_gradient_norms)
    assert all(g.isfinite().all() for g in sums.values())
    assert_close(sums, expected, 1e-6)


@pytest.mark.parametrize("name", ["transformer_tied", "embedding", "flattened", "table"])
@every_mode
def test_a_loss_that_is_not_finite(name, mode):
    case = zoo.BY_NAME[name]
    model = unchecked(case.build(), mode, 0.5)
    loss = losses_times(model, case, case.batch(4), torch.tensor([1.0, 1.0, float("nan"), 1.0]))
    loss.backward()
    sums = gradients_of(model)
    assert model.nonfinite_samples == 1
    assert_close(
        sums,
        clipped_sums(model, oracle.pick(case.batch(4), [0, 1, 3]), case.per_sample_loss),
        1e-5,
    )


@every_mode
def test_the_weighted_sum_of_the_others_is_bit_identical(mode):
    """Where the forward's rounding does not depend on the batch size: one product a sample."""
    batch = zoo.numbers(4, 16, 8, out=(16, 6))
    model = private(zoo.linear(), mode, 1.0)
    sums = clipped_sums(model, zoo.poisoned_sample(batch, 1))
    others = clipped_sums(model, oracle.pick(batch, [0, 2, 3]))
    assert all(torch.equal(sums[name], others[name]) for name in others)


@every_mode
def test_only_poisoned_samples(mode):
    batch = zoo.numbers(2, 16, 8, out=(16, 6))
    model = private(zoo.linear(), mode, 1.0)
    poisoned = zoo.poisoned_sample(zoo.poisoned_sample(batch, 0), 1, float("inf"))
    sums = clipped_sums(model, poisoned)
    assert model.nonfinite_samples == 2
    assert all((g == 0).all() for g in sums.values())


@every_mode
def test_poisoned_samples_are_counted_until_zero_grad(mode):
    batch = zoo.poisoned_sample(zoo.numbers(2, 16, 8, out=(16, 6)), 1)
    model = private(zoo.linear(), mode)
    for count in (1, 2):
        private_loss(model, batch, zoo.product).backward()
        assert model.nonfinite_samples == count
    model.clear_gradients()
    assert model.nonfinite_samples == 0


# One sample more or less


@pytest.mark.parametrize("name", ["tokens", "transformer_tied", "reused", "embedding", "conv2d"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@every_mode
def test_one_sample_moves_the_sum_by_at_most_the_threshold(name, clipping, mode):
    case = zoo.BY_NAME[name]
    model = private(case.build(), mode, 0.1, clipping)
    whole = clipped_sums(model, case.batch(5), case.per_sample_loss)
    assert (model.per_sample_gradient_norms > 0.1).all()
    for left_out in range(5):
        kept = [i for i in range(5) if i != left_out]
        sums = clipped_sums(model, oracle.pick(case.batch(5), kept), case.per_sample_loss)
        moved = total_norm({n: whole[n] - sums[n] for n in whole})
        assert moved <= 0.1 * (1 + 1e-5)
        assert moved >= 0.1 * (1 - 1e-3) or clipping == "per_layer"


@every_dtype
@every_mode
def test_a_sample_that_dominates(mode, dtype):
    """It takes nothing from the others, and adds no more than they do."""
    batch = oracle.move(zoo.numbers(4, 16, 8, out=(16, 6)), dtype=dtype)
    model = private(zoo.linear().to(dtype), mode, 1.0)
    whole = clipped_sums(model, zoo.dominating_sample(batch, 2, 1024.0))
    others = clipped_sums(model, oracle.pick(batch, [0, 1, 3]))
    moved = total_norm({n: whole[n] - others[n] for n in whole})
    assert 1 - 1e-2 <= moved <= 1 + 1e-5


# Any shape


def strided(x: Tensor) -> Tensor:
    """The same values with gaps between them."""
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


def turned(x: Tensor) -> Tensor:
    """The same values, features outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def repeated(x: Tensor) -> Tensor:
    """One feature's values for all of them, once in memory."""
    return x[..., :1].expand(x.shape)


PLACES = {
    "plain": lambda net, x: net.layer(x),
    "time_major": lambda net, x: net.layer(x.transpose(0, 1)).transpose(0, 1),
    "flattened": lambda net, x: net.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
}


def random_shapes(count: int) -> list:
    draw = torch.Generator().manual_seed(5)

    def number(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=draw))

    memories = (Tensor.contiguous, strided, turned, repeated)
    shapes = []
    for n in range(count):
        b, t, p, d = number(7), number(33), number(21), number(17)
        place, memory = list(PLACES)[n % len(PLACES)], memories[n % len(memories)]
        name = f"{place}-{memory.__name__}-b{b}-t{t}-p{p}-d{d}"
        shapes.append(pytest.param(place, memory, (b, t, p, d), id=name))
    return shapes


@pytest.mark.parametrize(("place", "memory", "sizes"), random_shapes(40))
def test_any_shape(place, memory, sizes):
    b, t, p, d = sizes
    inputs, targets = oracle.move(zoo.numbers(b, t, p, out=(t, d)), dtype=torch.float64)
    net = zoo.seeded(lambda: zoo.Net(PLACES[place], layer=nn.Linear(p, d))).double()
    batch = memory(inputs), targets
    expected = oracle.per_sample_gradients(net, batch, zoo.product)
    norms = oracle.norms(expected)
    limit = float(norms.mean())
    for mode in MODES:
        model = unchecked(net, mode, limit)
        sums = clipped_sums(model, batch)
        torch.testing.assert_close(model.per_sample_gradient_norms, norms, rtol=1e-9, atol=0)
        assert_close(sums, oracle.clipped_sum(expected, limit), 1e-9)
        model.to_standard_module()
