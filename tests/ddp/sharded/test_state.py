"""Whole states: which are refused, and that every parameter has one."""

import copy

import pytest
import torch
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_optimizer import NAME, in_groups
from tests.support.beside import Beside, chain_loss, wrapped
from tests.support.on_ranks import on_ranks


@pytest.mark.parametrize("name", [NAME, "fsdp"])
@on_ranks(2)
def test_states_of_other_networks_are_refused(context: Context, name: str) -> None:
    """What fits no parameter is refused by name, before anything changes; what fits is taken."""
    model = wrapped(context, name)
    groups = in_groups(model)
    groups[0]["amsgrad"] = True  # so that a value exists which the defaults do not tell of
    optimizer = model.make_optimizer(torch.optim.Adam, params=groups, lr=0.1)
    chain_loss(0)(model, context.rank).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    good = optimizer.state_dict()
    for key, value, message in (
        ("exp_avg", torch.ones(6), r"exp_avg is \[6\] for a parameter \[6, 6\]"),
        (
            "max_exp_avg_sq",
            torch.ones(6, 1),
            r"max_exp_avg_sq is \[6, 1\] for a parameter \[6, 6\]",
        ),
        ("step", torch.ones(6, 6), r"step is \[6, 6\] for a parameter \[6, 6\].*weight"),
    ):
        bad = copy.deepcopy(good)
        bad["state"][0][key] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
    bad = copy.deepcopy(good)
    bad["state"] |= {17: bad["state"][0], "x": {}}
    with pytest.raises(ValueError, match=r"parameters \[17, 'x'\], which are in none"):
        optimizer.load_state_dict(bad)
    for number, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(values, good["state"][number])
    other = copy.deepcopy(good)
    numbers = [n for group in other["param_groups"] for n in group["params"]]
    for group in other["param_groups"]:
        group["params"] = [n + 5 for n in group["params"]]
    other["state"] = {n + 5: other["state"][n] for n in reversed(numbers)}
    other["state"][5]["step"] = float(other["state"][5]["step"])  # as of early versions of torch
    optimizer.load_state_dict(other)
    for number, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(values, good["state"][number], check_dtype=False)


class WithNothing(nn.Module):
    """Two of its parameters have no element, one of them the last of its dtype."""

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.ones(8))
        self.last = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return (self.weight * x).sum() + self.none.sum() + self.last.sum()


@pytest.mark.parametrize("name", [NAME, "fsdp"])
@on_ranks(2)
def test_a_parameter_without_elements_has_a_state(context: Context, name: str) -> None:
    pair = Beside(context, name, WithNothing())
    ours = pair.model.make_optimizer(torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(pair.reference.parameters(), lr=0.1)
    for step in range(3):
        x = [torch.randn(8, generator=torch.Generator().manual_seed(9 * step + r)) for r in (0, 1)]
        pair.backward(lambda model, rank, x=x: model(x[rank]))
        pair.finish()
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        state, expected = ours.state_dict()["state"], plain.state_dict()["state"]
        assert set(state) == set(expected) == {0, 1, 2}
        for number, values in expected.items():
            torch.testing.assert_close(state[number], values)
        ours.load_state_dict(plain.state_dict() if step else ours.state_dict())
