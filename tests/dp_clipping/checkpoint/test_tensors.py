"""Tensors of a checkpoint by name: an optimizer's numbers become names and numbers again."""

from pathlib import Path

import pytest
import torch

from dp_clipping.checkpoint.tensors import (
    by_name,
    by_number,
    check_groups,
    names_of,
    room_for,
    take_tensors,
    with_tensors,
)
from tests.support.saved_runs import build, train


def two_groups(parameters):
    first, *rest = list(parameters)
    return torch.optim.SGD([{"params": rest, "lr": 0.1}, {"params": [first]}], lr=0.5, momentum=0.9)


@pytest.fixture
def run():
    made = build(make=two_groups)
    train(made, 1)
    return made.engine._runs[0]


def test_names_stand_for_numbers_and_back(run):
    state = by_name(run)
    names = set(names_of(run).values())
    assert set(state["state"]) == names
    assert [group["params"] for group in state["param_groups"]] == [
        ["first.bias", "last.weight", "last.bias"],
        ["first.weight"],
    ]
    assert state["param_groups"][0]["lr"] == 0.1
    again, own = by_number(run, state), run.optimizer.state_dict()
    for group, other in zip(again["param_groups"], own["param_groups"], strict=True):
        assert group["params"] == other["params"]
    for number, values in own["state"].items():
        assert torch.equal(again["state"][number]["momentum_buffer"], values["momentum_buffer"])


def test_momentum_is_that_of_its_own_parameter(run):
    for parameter, name in names_of(run).items():
        assert by_name(run)["state"][name]["momentum_buffer"].shape == parameter.shape


def test_tensors_are_taken_out_and_put_back(run):
    module = {"w": torch.ones(2), "extra": 3}
    state = {"w": {"momentum_buffer": torch.zeros(2), "step": 4}}
    contents = {"module_state_dict": module, "optimizer_state_dict": {"state": state, "lr": 1}}
    tensors = take_tensors(contents)
    assert contents["module_state_dict"] == {"extra": 3}
    assert contents["optimizer_state_dict"]["state"] == {"w": {"step": 4}}
    assert len(tensors) == 2
    whole = with_tensors(contents, tensors)
    assert list(whole["module_state_dict"]) == ["extra", "w"]
    assert torch.equal(whole["module_state_dict"]["w"], module["w"])
    momentum = whole["optimizer_state_dict"]["state"]["w"]["momentum_buffer"]
    assert torch.equal(momentum, torch.zeros(2))
    assert contents["optimizer_state_dict"]["state"] == {"w": {"step": 4}}, "left as it is"


def test_other_groups_are_refused(run):
    saved = {"optimizer_state_dict": by_name(run)}
    check_groups(run, saved, Path("x"))
    groups = saved["optimizer_state_dict"]["param_groups"]
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    with pytest.raises(ValueError, match=r"group 0 of the optimizer holds first\.bias in only one"):
        check_groups(run, saved, Path("x"))


def test_room_is_of_the_models_shapes(run):
    module = "module_state_dict"
    known = {f"{module}.first.weight": torch.empty(5, 3), f"{module}.gone": torch.empty(2)}
    room = room_for(run, {}, known)
    assert list(room) == [f"{module}.first.weight"]
    assert room[f"{module}.first.weight"].shape == (5, 3)
    with pytest.raises(ValueError, match=r"first.weight is \[3, 5\] in the checkpoint and"):
        room_for(run, {}, {f"{module}.first.weight": torch.empty(3, 5)})
