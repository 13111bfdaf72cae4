"""Tests what one sample can do: not finite, more or less, in another arithmetic; unlike steps.

The steps of a run need not be alike: the network may use its layers otherwise, sequences have other
lengths, and random numbers of a forward need not come again in its backward.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.support import zoo
from tests.support.private_steps import (
    FUSED,
    REFERENCE,
    SAMPLES,
    Way,
    check_bounds,
    check_step,
    gradients_of,
    limits_of,
    make_private,
    middle,
    on_kernels,
    skip_all_checks,
    step,
)
from tests.support.turns import in_turn

every_mode = pytest.mark.parametrize("mode", REFERENCE)
every_clipping = pytest.mark.parametrize("clipping", ["flat", "per_layer"])
both_fused = pytest.mark.parametrize("mode", FUSED)
STYLES = {
    f"{mode}-{clipping}": Way(mode=mode, clipping=clipping)
    for clipping in ("flat", "per_layer") for mode in REFERENCE
}  # fmt: skip


def unchecked(case: zoo.Case, way: Way, limit: float | list[float]) -> Any:
    """Returns a run in which nobody looks for samples that see each other."""
    run = make_private(case, way, limit)
    skip_all_checks(run.model)
    return run


def total(sums: dict[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in sums.values()]).norm())


# Samples whose gradient is not finite

POISONED = ("mlp", "tokens", "same_weight", "wide", "layer_norm")
BY_LOSS = ("transformer_tied", "padding_idx_tied", "lstm_packed", "time_major_flattened")


def check_a_bad_sample(name: str, way: Way, value: float) -> None:
    """It is as if it were not there: nothing of it is in a sum, and the others' norms stay."""
    case = zoo.BY_NAME[name]
    others = oracle.pick(gradients_of(case, way.dtype), [0, 1, 3])
    limits = limits_of(others, way.clipping)
    run = unchecked(case, way, limits)
    batch, factors = oracle.pick(run.batch, [0, 1, 2, 3]), None
    if name in POISONED:
        batch = zoo.poisoned_sample(batch, 2, value)
    else:
        factors = torch.tensor([1.0, 1.0, value, 1.0], dtype=way.dtype)
    for _ in range(2):
        norms, sums = step(run, way, batch, factors)
        assert not norms[2].isfinite()
        check_step((norms[[0, 1, 3]], sums), others, limits, way)


@pytest.mark.parametrize(("name", "way"), in_turn([*POISONED, *BY_LOSS], STYLES))
def test_a_sample_that_is_not_finite(name, way):
    for value in (torch.nan, torch.inf, -torch.inf):
        check_a_bad_sample(name, way, value)


@pytest.mark.parametrize(("name", "mode"), in_turn([*POISONED, *BY_LOSS], FUSED))
def test_a_sample_that_is_not_finite_on_kernels(interpreter, name, mode):
    number = [*POISONED, *BY_LOSS].index(name) + FUSED.index(mode)
    clipping, value = (
        ("flat", "per_layer")[number // 2 % 2],
        (torch.nan, torch.inf)[number // 4 % 2],
    )
    way = on_kernels(Way(mode=mode, clipping=clipping))
    interpreter.run(check_a_bad_sample, name, way, value)


@every_mode
def test_what_is_not_finite_is_counted_and_nothing_may_be_left(mode):
    case = zoo.BY_NAME["tokens"]
    run = unchecked(case, Way(mode=mode), 1.0)
    good = oracle.pick(run.batch, [0, 1])
    step(run, Way(), good)  # no first step is noise alone
    bad = zoo.poisoned_sample(zoo.poisoned_sample(good, 0), 1, torch.inf)
    for count in (2, 4):
        run.criterion(run.model(bad[0]), bad[1]).backward()
        assert run.model.nonfinite_samples == count
    assert all((p.grad == 0).all() for p in run.network.parameters())
    run.optimizer.zero_grad()
    assert run.model.nonfinite_samples == 0


@every_mode
def test_the_sum_of_the_others_is_bit_identical(mode):
    """Where the forward's rounding does not depend on the batch size: one product a sample."""
    case = zoo.Case(
        "linear", zoo.linear, lambda b: zoo.numbers(b, 16, 8, out=(16, 6)), zoo.product
    )  # fmt: skip
    way = Way(mode=mode, dtype=torch.float32)
    run = unchecked(case, way, 1.0)
    _, sums = step(run, way, zoo.poisoned_sample(oracle.pick(run.batch, [0, 1, 2, 3]), 1))
    _, others = step(run, way, oracle.pick(run.batch, [0, 2, 3]))
    assert all(torch.equal(sums[name], others[name]) for name in others)


# One sample more or less, and in which arithmetic


BOUNDED = ("transformer_tied", "same_weight", "reused_on_fewer_tokens", "padding_idx_tied",
           "frames", "wide", "encoder_layer", "time_major_flattened")  # fmt: skip
IN_16_BIT_TOO = {
    f"{dtype}-{mode}": Way(mode=mode, dtype=dtype)
    for mode in REFERENCE for dtype in (torch.float32, torch.bfloat16, torch.float16)
}  # fmt: skip


@pytest.mark.parametrize(("name", "way"), in_turn(BOUNDED, IN_16_BIT_TOO, fast=3))
def test_a_sample_adds_at_most_c(name, way):
    check_bounds(zoo.BY_NAME[name], way)


# Plans of the kernels

PLANS = (
    {"norm_algorithm": "width"},
    {"norm_algorithm": "input_length"},
    {"norm_algorithm": "width", "tile_size": 16},
    {"tile_size": 32},
    {"memory_budget": 0},
    {"memory_budget": 7_000},  # of a part of the layers
)


def check_plan(way: Way) -> None:
    case = zoo.BY_NAME["transformer_tied"]
    gradients = oracle.pick(gradients_of(case, way.dtype), slice(0, 3))
    limits = limits_of(gradients, way.clipping)
    run = unchecked(case, way, limits)
    for _ in range(2):
        check_step(step(run, way, oracle.pick(run.batch, [0, 1, 2])), gradients, limits, way)
    assert run.model.plan_table()


@pytest.mark.parametrize(("number", "mode"), in_turn(range(len(PLANS)), FUSED))
def test_plans(interpreter, number, mode):
    """Whatever the plan, sums and norms are the same."""
    is_other = (number + FUSED.index(mode) + number // 2) % 2
    clipping, function = ("flat", "per_layer")[is_other], ("abadi", "automatic")[number // 2 % 2]
    way = Way(mode=mode, clipping=clipping, function=function, options=PLANS[number])
    interpreter.run(check_plan, on_kernels(way))


def fan() -> nn.Module:
    """Layers of one input, more of them than a row of a launch takes."""
    heads = nn.ModuleList(nn.Linear(16, n, bias=False) for n in (8, 24, 16, 40, 8))
    return zoo.Net(lambda net, x: torch.cat([head(x) for head in net.heads], dim=-1), heads=heads)


def check_layers_of_one_input(way: Way) -> None:
    case = zoo.Case(
        "fan", lambda: zoo.seeded(fan), lambda b: zoo.numbers(b, 8, 16, out=(8, 96)), zoo.product
    )
    gradients = gradients_of(case, way.dtype)
    limits = limits_of(gradients, way.clipping)
    run = unchecked(case, way, limits)
    check_step(step(run, way, run.batch), gradients, limits, way)


@every_clipping
def test_layers_of_one_input(interpreter, clipping):
    way = Way(mode=FUSED[1], clipping=clipping, options=PLANS[0])
    interpreter.run(check_layers_of_one_input, on_kernels(way))


def check_gram_sums_that_overflow(mode: str, tile_size: int | None) -> None:
    """A Gram sum of minus infinity is no small norm: such a sample is left out, and counted."""
    x, y = torch.zeros(SAMPLES, 128, 16), torch.zeros(SAMPLES, 128, 16)
    x[0, 0, 0], x[0, 64, 0] = 1e10, -1e10
    y[0, 0, 0], y[0, 64, 0] = 1.8e9, 1e9
    x[1:], y[1:] = 1.0, 1.0
    case = zoo.Case("linear", lambda: zoo.linear(16, 16), lambda b: (x, y), zoo.product)
    options = {"norm_algorithm": "width", "tile_size": tile_size}
    way = Way(mode=mode, dtype=torch.float32, options=options)
    run = unchecked(case, way, 1.0)
    step(run, way, (x[1:], y[1:]))
    run.criterion(run.model(x[:1]), y[:1]).backward()
    assert not run.network.weight.grad.any()
    assert run.model.nonfinite_samples == 1
    assert not run.model.per_sample_gradient_norms.isfinite().any()


@pytest.mark.parametrize("tile_size", [None, 16])
@both_fused
def test_gram_sums_that_overflow(interpreter, mode, tile_size):
    interpreter.run(check_gram_sums_that_overflow, mode, tile_size)


# Steps that differ


class Repeated(nn.Module):
    """A layer that is called `times` times, and another one with the same weight."""

    def __init__(self, times: int = 2, width: int = 6) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(width, width), times
        self.other = nn.Linear(width, width, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return self.other(x)


class Chosen(nn.Module):
    """Calls some of its layers: another one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.times = nn.Linear(6, 6), 0
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.times % 3](torch.tanh(self.first(x)))


def check_steps_that_differ(build: Callable[[], nn.Module], way: Way) -> None:
    """Each step has another number in `times`, and sequences of another length."""
    make = lambda b, length=5: zoo.numbers(b, length, 6, out=(length, 6))  # noqa: E731
    case = zoo.Case("differs", lambda: zoo.seeded(build), make, zoo.product)
    run, network = unchecked(case, way, 0.1), case.build()
    for times, length in ((2, 5), (5, 5), (1, 3), (2, 9), (2, 5), (0, 1)):
        run.network.times = network.times = times
        batch = oracle.move(make(4, length), dtype=way.dtype)
        gradients = oracle.per_sample_gradients(network, batch, zoo.product)
        check_step(step(run, way, batch), gradients, 0.1, way)


@pytest.mark.parametrize("build", [Repeated, Chosen])
@every_mode
def test_steps_that_differ(build, mode):
    check_steps_that_differ(build, Way(mode=mode))


@pytest.mark.parametrize("build", [Repeated, Chosen])
@both_fused
def test_steps_that_differ_on_kernels(interpreter, build, mode):
    interpreter.run(check_steps_that_differ, build, on_kernels(Way(mode=mode)))


class Forgetful(nn.Module):
    """Drops out other hidden units whenever it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.dropout(self.first(x), 0.5, self.training))

    def forward(self, x: Tensor) -> Tensor:
        options = {"use_reentrant": False, "preserve_rng_state": False}
        return self.second(checkpoint(self.hidden, x, **options))


FORGETFUL = zoo.Case(
    "forgetful", lambda: zoo.seeded(Forgetful), lambda b: zoo.numbers(b, 6, out=(3,)), zoo.product
)


def check_other_random_numbers(mode: str) -> None:
    way = Way(mode=mode, dtype=torch.float32)
    run = unchecked(FORGETFUL, way, 0.1)
    for i in range(3):
        _, sums = step(run, way, oracle.pick(run.batch, [i]))
        assert 0.1 * (1 - 1e-4) <= total(sums) <= 0.1 * (1 + 1e-6)


@every_mode
def test_recomputed_blocks_that_draw_other_numbers(mode):
    check_other_random_numbers(mode)


@both_fused
def test_recomputed_blocks_that_draw_other_numbers_on_kernels(interpreter, mode):
    interpreter.run(check_other_random_numbers, mode)


def test_a_second_backward_does_not_repeat_numbers_of_the_next_forward():
    after = []
    for mode in ("ghost", "bookkeeping"):
        way = Way(mode=mode, dtype=torch.float32)
        run = unchecked(FORGETFUL, way, 1.0)
        torch.manual_seed(1)
        step(run, way, oracle.pick(run.batch, [0]))
        after.append(torch.rand(4))
    assert torch.equal(*after)


@every_clipping
@every_mode
def test_a_refused_backward_leaves_nothing(clipping, mode):
    """What an ordinary backward of private outputs hands over is in no sum of the right one."""
    case, way = zoo.BY_NAME["wide"], Way(mode=mode, clipping=clipping, dtype=torch.float32)
    limits = limits_of(gradients_of(case, torch.float32), clipping)
    found = []
    for is_refused in (False, True):
        run = unchecked(case, way, limits)
        outputs = run.model(run.batch[0])
        if is_refused:
            with pytest.raises(RuntimeError, match="private criterion"):
                outputs.pow(3).sum().backward(retain_graph=True)
        run.criterion(outputs, run.batch[1]).backward()
        found.append([p.grad.clone() for p in run.network.parameters()])
    assert all(map(torch.equal, *found))


# What the optimizer applies


@every_mode
def test_sums_of_several_backwards_add_up_in_float32(mode):
    """One that is 2⁻¹² of the other is lost beside it in bfloat16."""
    case, way = zoo.BY_NAME["tokens"], Way(mode=mode, dtype=torch.bfloat16)
    small = oracle.pick(case.batch(SAMPLES), [4])
    small = small[0], small[1] * 2.0**-12
    found = []
    for batches in ([[0, 1]], [None], [[0, 1], None]):
        run = unchecked(case, way, 1e3)
        for which in batches:
            inputs, targets = small if which is None else oracle.pick(run.batch, which)
            run.criterion(run.model(inputs.bfloat16()), targets).backward()
        found.append([p.grad.clone() for p in run.network.parameters()])
    for large, little, both in zip(*found, strict=True):
        assert both.dtype == torch.float32
        assert torch.equal(both, large + little)
        assert (both != large).any()


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("mode", [*REFERENCE, *FUSED])
def test_a_mean_is_applied(mode):
    """The clipped sum over the expected batch size, times the learning rate."""
    case = zoo.BY_NAME["tokens"]
    gradients = gradients_of(case, torch.float64)
    limit = middle(oracle.norms(gradients))
    mean = {"loss_reduction": "mean", "criterion": zoo.Criterion(case.per_sample_loss, "mean")}
    run = unchecked(case, replace(Way(mode=mode), options=mean | {"expected_batch_size": 8}), limit)
    run.optimizer.param_groups[0]["lr"] = 0.5
    before = {name: p.detach().clone() for name, p in run.network.named_parameters()}
    run.criterion(run.model(run.batch[0]), run.batch[1]).backward()
    run.optimizer.step()
    for name, expected in oracle.clipped_sum(gradients, limit).items():
        parameter = run.network.get_parameter(name)
        torch.testing.assert_close(parameter.grad, expected / 8)
        torch.testing.assert_close(before[name] - parameter, 0.5 * expected / 8)
