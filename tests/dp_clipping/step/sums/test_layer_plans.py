"""Plans of a step, by the uses of linear layers that a forward has, or is expected to have."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.capture.compile_forecast import CompiledShapes
from dp_clipping.layers.recorder import FACTOR_SLOTS, GRADIENT_SLOTS, Trainable
from dp_clipping.modes import policy_of
from dp_clipping.planning.cost_model import ACCUMULATE, INSTANTIATE, LinearShape
from dp_clipping.planning.plan import Plans
from dp_clipping.step.sums import layer_plans
from dp_clipping.step.sums.layer_plans import FusedPlans
from tests.dp_clipping.conftest import trained

B, T, D, P = 3, 8, 16, 64  # samples, tokens, outputs, inputs
PLANNED = 4  # samples that compiled code is planned for
WEIGHTS = 2 * 2 * D * P  # bytes of both in bfloat16
FACTORS = B * T * (D + P) * 2  # bytes of a use in bfloat16


@pytest.fixture
def weights() -> list[Trainable]:
    return [trained(Parameter(torch.zeros(D, P, dtype=torch.bfloat16)), name) for name in "ab"]


@pytest.fixture
def in_use(monkeypatch) -> SimpleNamespace:
    """Replaces the device's allocator: it says `bytes`, and counts how often it is `asked`."""
    memory = SimpleNamespace(bytes=0, asked=0)

    def allocated(_device):
        memory.asked += 1
        return memory.bytes

    monkeypatch.setattr(layer_plans, "allocated", allocated)
    return memory


def context_of(
    weights: list[Trainable], mode: str = "flash_bookkeeping", **options
) -> SimpleNamespace:
    """Returns a stand-in for a `StepContext`, with what plans read of it."""
    capture = SimpleNamespace(trigger=torch.zeros(()), trained=weights)
    policy = policy_of(mode, **options)
    streams = policy.per_layer and not policy.two_passes
    return SimpleNamespace(
        capture=capture, policy=policy, plans=Plans(), streams=streams, sharding=None,
        reducer=SimpleNamespace(splits_parameters=False),
    )  # fmt: skip


def call(weight: Trainable, tokens: int = T) -> tuple:
    return weight, torch.Size((B, tokens, P)), torch.bfloat16, D


def expected(weights: list[Trainable], held: int = 0) -> CompiledShapes:
    """Returns a forecast of one use of each weight, in float32."""
    shapes = {w: LinearShape(w.name, 1, T, P, D, 4, 4) for w in weights}
    return CompiledShapes(shapes, dict.fromkeys(weights, torch.float32), held)


def test_a_forward_is_measured_once_for_each_batch_size(weights, in_use):
    """It takes an answer of the allocator for each layer."""
    context, asked, made = context_of(weights), [], []
    for batch_size in (B, B, 2 * B, B):
        before = in_use.asked
        plans = FusedPlans(context, batch_size)
        for _ in range(100):
            plans.calls.append(call(weights[0]))
        asked.append(in_use.asked - before >= 100)
        plans.make()
        made.append(plans)
    assert asked == [True, False, True, False]
    assert made[3].choices is made[1].choices, "nor is the plan made again"
    assert context.plans.last is made[3].plan is not made[2].plan


def test_a_layer_that_was_expected_counts_once(weights):
    """Beside compiled layers, one that is not calls its own forward, which notes it again."""
    plans = FusedPlans(context_of(weights), B, expected(weights[:1]))
    plans.calls += map(call, weights)
    plans.make()
    assert [(use.name, use.tokens) for use in plans.plan.uses] == [("a", T), ("b", T)]


@pytest.mark.parametrize("split", [False, True])
def test_weights_that_another_rank_norms_are_summed_unrounded(weights, split):
    """Each tensor-parallel rank plans by its own memory, and the first one's norms clip all."""
    context = context_of(weights)
    context.reducer.splits_parameters = True
    parts = {weight.parameter: SimpleNamespace(split=split) for weight in weights}
    context.sharding = SimpleNamespace(parts=parts)
    plans = FusedPlans(context, B)
    plans.calls.append(call(weights[0], 16 * T))  # many tokens: G is the least to keep
    plans.make()
    assert (plans.choices[weights[0]].algorithm == INSTANTIATE) is split


def test_uses_of_a_layer_are_more_tokens(weights):
    plans = FusedPlans(context_of(weights), B)
    for weight, tokens in zip((*weights, weights[0]), (T, T, 2 * T), strict=True):
        plans.calls.append(call(weight, tokens))
    plans.make()
    assert [(use.name, use.tokens) for use in plans.plan.uses] == [("a", 3 * T), ("b", T)]


@pytest.mark.parametrize(("samples", "inputs", "tokens"), [(0, P, 0), (1, 1, T), (B, 0, 0)])
def test_tokens_of_small_batches_and_layers(weights, samples, inputs, tokens):
    plans = FusedPlans(context_of(weights), samples)
    plans.calls.append((weights[0], torch.Size((samples, T, inputs)), torch.float32, D))
    plans.make()
    assert [use[1:5] for use in plans.plan.uses] == [(samples, tokens, inputs, D)]


@pytest.mark.parametrize(
    ("mode", "options", "saved", "budget"),
    [
        ("flash_bookkeeping", {}, 50_000, int(0.93 * 50_000)),
        ("flash_bookkeeping", {}, 100, int(0.93 * WEIGHTS)),  # gradients, after backward
        ("flash_bookkeeping", {"memory_budget": 5}, 50_000, 5),
        ("flash_bookkeeping", {"per_layer": True}, 50_000, None),  # no more waits than may
        ("flash", {}, 50_000, 0),
        ("flash", {"per_layer": True}, 50_000, 0),
    ],
)
def test_as_much_is_kept_as_an_ordinary_step_holds(weights, in_use, mode, options, saved, budget):
    in_use.bytes = 7
    plans = FusedPlans(context_of(weights, mode, **options), B)
    in_use.bytes += saved
    plans.calls.append(call(weights[0]))
    plans.make()
    assert plans.plan.budget == budget


def test_rooms_are_what_is_free_when_backward_comes_to_a_layer(weights, in_use, monkeypatch):
    """Two uses of `a`, one of `b`, and two of a layer that is not planned."""
    rooms, plan, start = [], layer_plans.Plan, 7
    monkeypatch.setattr(
        layer_plans, "Plan", lambda *given, **named: rooms.append(named["rooms"]) or plan(*given)
    )
    in_use.bytes = start
    plans = FusedPlans(context_of(weights), B)
    inputs = B * T * P * 2
    x, y, larger_x = torch.zeros(B, 100), torch.zeros(B, 50), torch.zeros(B, 200)
    in_use.bytes = start + 100 + inputs
    plans.calls.append(call(weights[0]))
    in_use.bytes = start + 20_000
    plans.note_other(trained(Parameter(torch.zeros(5))), x, y, 30)  # 60 bytes of gradients
    in_use.bytes = start + inputs - 1  # something else was freed
    plans.calls.append(call(weights[1]))
    in_use.bytes = start + 40_000
    plans.calls.append(call(weights[0]))
    in_use.bytes = start + 60_000
    plans.note_other(trained(Parameter(torch.zeros(5000))), larger_x, y, 10**6)
    in_use.bytes = start + 50_000
    plans.make()
    both = larger_x.nbytes + y.nbytes  # more is neither taken in passing nor kept
    first, second = 20_000 + x.nbytes, 60_000 + larger_x.nbytes
    peak = second
    assert rooms == [[
        (0, 50_000 - 100), (1, 50_000),
        (2, peak - second - both - both), (1, peak - first - 30 - both - 60),
    ]]  # fmt: skip


def test_after_a_forward_nothing_is_measured(weights, in_use):
    """Backward calls layers again where activations are checkpointed."""
    plans = FusedPlans(context_of(weights), B)
    plans.make()
    in_use.asked = 0
    plans.calls.append(call(weights[0]))
    plans.note_other(weights[0], torch.zeros(1), torch.zeros(1), 1)
    assert in_use.asked == 0


def test_a_layer_whose_forward_was_not_seen_has_the_same_choice(weights):
    seen, unseen = (FusedPlans(context_of(weights, memory_budget=1 << 30), B) for _ in range(2))
    seen.calls.append(call(weights[0]))
    seen.make()
    unseen.make()
    pair = tuple(torch.zeros(B, T, n, dtype=torch.bfloat16) for n in (D, P))
    assert seen.choice_of(weights[0], pair) is seen.choices[weights[0]]
    assert unseen.choice_of(weights[0], pair) == seen.choices[weights[0]]


@pytest.mark.parametrize("room", [2, 1, 0])
def test_factors_are_kept_as_far_as_the_budget_goes(weights, room):
    """The others are computed again by a second backward."""
    options = {"norm_algorithm": ACCUMULATE, "memory_budget": room * FACTORS}
    plans = FusedPlans(context_of(weights, **options), B)
    assert not plans.runs_twice  # so far
    for weight in weights:
        plans.calls.append(call(weight))
    plans.make()
    assert plans.kept_as_they_are == set(weights[:room])
    assert plans.gradient_bytes == {}
    assert plans.runs_twice == (room < 2)


def test_gradients_are_kept_where_they_are_the_fastest(weights):
    """A thousand tokens have factors that are larger."""
    plans = FusedPlans(context_of(weights, memory_budget=1 << 30), B)
    plans.calls.append(call(weights[0], 1000))
    plans.make()
    assert plans.kept_as_they_are == set()
    assert plans.gradient_bytes == {weights[0]: 2 * B * D * P}
    assert not plans.runs_twice


def algorithms(plans: FusedPlans) -> list[str]:
    return [choice.algorithm for choice in plans.ahead.choices]


BOTH = PLANNED * 2 * 4 * D * P  # bytes of the gradients of two layers in float32


@pytest.mark.parametrize(
    ("saved", "foresaw"),
    [(B * 2 * BOTH // PLANNED, False), (B * BOTH // PLANNED, True), (0, False)],
    ids=["as much", "half", "not known"],
)
def test_a_plan_is_another_one_if_the_forward_has_saved_less(weights, in_use, saved, foresaw):
    """Fewer gradients fit then: it is known once for each set of shapes."""
    context, forecast = context_of(weights), expected(weights, 2 * BOTH // PLANNED)
    plans = FusedPlans(context, B, forecast)
    before = algorithms(plans)
    in_use.bytes = saved
    assert plans.foresaw_too_much() is foresaw
    in_use.bytes = 0
    again = FusedPlans(context, B, forecast)
    in_use.bytes = saved
    assert (algorithms(again) != before) is foresaw
    assert again.ahead.budget == int(0.93 * (BOTH if foresaw else 2 * BOTH))
    assert not again.foresaw_too_much()
    assert FusedPlans(context, B, forecast).ahead is again.ahead
    assert not FusedPlans(context, 0, forecast).foresaw_too_much()


def test_nothing_is_expected_without_compiled_layers(weights, in_use):
    plans = FusedPlans(context_of(weights), B)
    in_use.bytes = 1
    assert not plans.foresaw_too_much()
    assert plans.slots_of(SimpleNamespace(records={"weight": weights[0]})) is None
    assert plans.of_slots is None


@pytest.mark.parametrize(
    ("options", "tokens", "names", "shapes"),
    [
        ({"norm_algorithm": ACCUMULATE}, T, FACTOR_SLOTS, [(B, T, D), (B, T, P)]),
        ({"memory_budget": 1 << 30}, 1000, GRADIENT_SLOTS, [(B, D, P), (B,)]),
    ],
)
def test_slots_are_those_of_what_is_planned(weights, options, tokens, names, shapes):
    """A layer of which nothing is known has one slot for each G."""
    uses = {weights[0]: LinearShape("a", 1, tokens, P, D, 4, 4)}
    forecast = CompiledShapes(uses, {weights[0]: torch.float32}, 0)
    plans = FusedPlans(context_of(weights, **options), B, forecast)
    layers = [SimpleNamespace(records={"weight": one}, kind="linear") for one in weights]
    slots = plans.slots_of(layers[0])
    assert slots.names == names
    assert [shape for shape, _ in slots.kinds] == shapes
    assert plans.slots_of(layers[1]) is None
    again = FusedPlans(context_of(weights, **options), B, forecast)
    assert plans.of_slots == plans.of_slots != again.of_slots
