"""What becomes of linear layers: uses that the forward meets, and what may be kept of them."""

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.modes import policy_of
from dp_clipping.planning.cost_model import Rates
from dp_clipping.step.fused.layer_plans import MEMORY_FRACTION, LayerPlans

WEIGHT = Parameter(torch.zeros(8, 16))
HELD = 1 << 20


def plans(mode: str = "flash_bookkeeping", known: dict | None = None, **options) -> LayerPlans:
    policy = policy_of(mode, **options)
    known = {} if known is None else known
    return LayerPlans({WEIGHT: "w"}, [WEIGHT], policy, known, 4, None, Rates, lambda: HELD)


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
    known: dict = {}
    made = []
    for _ in range(2):
        mine = plans(known=known)
        mine.will_use(WEIGHT, torch.zeros(4, 5, 16), 8)
        made.append(mine.make())
    assert made[0] is made[1]
    assert len(known) == 1


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
