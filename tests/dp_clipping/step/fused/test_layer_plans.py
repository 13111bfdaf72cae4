"""What becomes of linear layers: uses that the forward meets, and what may be kept of them."""

from dataclasses import replace

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.capture.compile_forecast import CompiledShapes
from dp_clipping.modes import policy_of
from dp_clipping.planning.cost_model import LinearShape, Rates
from dp_clipping.planning.plan import Plans
from dp_clipping.step.fused.layer_plans import MEMORY_FRACTION, LayerPlans
from tests.dp_clipping.conftest import trained

WEIGHT = trained(Parameter(torch.zeros(8, 16)), "w")
HELD = 1 << 20


def plans(
    mode: str = "flash_bookkeeping", earlier: Plans | None = None, batch_size: int = 4,
    forecast: CompiledShapes | None = None, saved: int = HELD, **options,
) -> LayerPlans:  # fmt: skip
    policy, earlier = policy_of(mode, **options), earlier or Plans()
    return LayerPlans([WEIGHT], policy, earlier, batch_size, forecast, Rates, lambda: saved)


def test_uses_are_noted_and_planned():
    """Tokens of several uses of a weight are those of one; a checkpoint's forward counts once."""
    mine = plans()
    x = torch.zeros(4, 5, 16)
    mine.will_use(WEIGHT, x, 8)
    mine.will_use(WEIGHT, x[:, :2], 8)
    (use,) = mine.make().uses
    assert (use.name, use.batch_size, use.tokens, use.inputs, use.outputs) == ("w", 4, 7, 16, 8)
    mine.will_use(WEIGHT, x, 8)
    assert mine._uses[WEIGHT].tokens == 7


def test_equal_uses_have_one_plan_over_steps():
    earlier, made = Plans(), []
    for _ in range(2):
        mine = plans(earlier=earlier)
        mine.will_use(WEIGHT, torch.zeros(4, 5, 16), 8)
        made.append(mine.make())
    assert made[0] is made[1]
    assert len(earlier.known) == 1


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("flash", {}, 0),
        ("flash", {"memory_budget": 77}, 77),
        ("flash_bookkeeping", {"memory_budget": 77}, 77),
        ("flash_bookkeeping", {}, int(MEMORY_FRACTION * HELD)),
        ("flash_bookkeeping", {"per_layer": True}, None),
    ],
)
def test_what_may_be_kept(mode, options, expected):
    mine = plans(mode, **options)
    mine.will_use(WEIGHT, torch.zeros(4, 5, 16), 8)
    assert mine.make().budget == expected


# Factors of a sample take 2400 bytes, its gradient 2048.
FORESEEN = CompiledShapes(
    {WEIGHT: LinearShape("w", 1, 25, 16, 32, 4, 4)}, {WEIGHT: torch.float32}, held=HELD
)


def test_compiled_layers_keep_no_more_than_their_forward_has_saved():
    """Measured in the first forward of a batch size, whose plan is made once more if it changes."""
    earlier = Plans()

    def of(batch_size: int, saved: int) -> LayerPlans:
        return plans(earlier=earlier, batch_size=batch_size, forecast=FORESEEN, saved=saved)

    first = of(3, 3000)
    assert first.ahead.budget == int(MEMORY_FRACTION * 4 * HELD)  # planned for four samples
    first.ahead.choices = [replace(first.ahead.choices[0], bytes=1)]  # any other plan
    assert first.foresaw_too_much()
    again = of(3, 77)
    assert again.ahead.budget == int(MEMORY_FRACTION * 4000)
    assert not again.foresaw_too_much()  # measured already
    assert again.make().budget == int(MEMORY_FRACTION * 4000)
    larger = of(5, 8 * HELD)
    assert larger.ahead.budget == int(MEMORY_FRACTION * 8 * HELD)
    assert not larger.foresaw_too_much()  # the plan stays
    assert not of(5, 0).foresaw_too_much()
    assert not plans(earlier=earlier, saved=1).foresaw_too_much()  # nothing was foreseen
