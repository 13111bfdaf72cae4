"""Places that hold values: what has changed there, and what is put back."""

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from dp_clipping.capture.checks.holders import Holder, Names, is_freed


class Place:
    held, other = 1, 2


def cell_of(value):
    return (lambda: value).__closure__[0]


def set_cell(cell):
    cell.cell_contents = 5


def rebind(kind):
    kind.held, kind.new = 5, 6
    del kind.other


PLACES = {
    "dict": (lambda: Holder("x.", {"held": 1, "other": 2}), lambda v: v.update(held=5), ["held"]),
    "dict that grows": (lambda: Holder("x.", {"a": 1}), lambda v: v.update(b=2), ["b"]),
    "list": (lambda: Holder("x.", [1, 2]), lambda v: v.append(3), [None]),
    "deque": (lambda: Holder("x.", deque([1], maxlen=1)), lambda v: v.append(3), [None]),
    "set": (lambda: Holder("x.", {1}), lambda v: v.add(2), [None]),
    "cell": (lambda: Holder("x.", cell_of(1)), set_cell, [None]),
    "array": (lambda: Holder("x.", np.zeros(2)), lambda v: v.fill(1), [None]),
    "class": (lambda: Names("x.", Place), rebind, ["held", "other", "new"]),
    "module": (
        lambda: Names("x.", {"held": 1, "else": 2}, names={"held", "new"}),
        lambda v: v.update({"held": 5, "new": 6, "else": 7}), ["held", "new"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen_and_put_back(place):
    make, change, keys = PLACES[place]
    holder = make()
    before = holder.copy()
    change(holder.values)
    if not isinstance(before, dict):  # of which a mark compares all at once
        assert not holder.is_as(before)
    assert sorted(map(str, holder.changed(before))) == sorted(map(str, keys))
    holder.put_back(before)
    if isinstance(before, dict):
        assert not holder.changed(before)
    else:
        assert holder.is_as(before)


def test_equal_numbers_are_no_change():
    holder = Holder("x.", {"a": 1000.0})
    before = holder.copy()
    holder.values["a"] = float("1000")
    assert not holder.changed(before)


def test_what_belongs_to_the_model():
    net = nn.BatchNorm1d(2)
    net.register_buffer("cache", None, persistent=False)
    held = Holder("", dict(net.named_buffers()), "buffers", {"cache"})
    assert held.is_model("running_mean")
    assert not held.is_model("cache")
    assert Holder("", {}, "parameters").is_model("weight")
    assert Holder("", {"a": net, "b": nn.ReLU()}, "modules").is_model("a")
    assert not Holder("", {"a": net, "b": nn.ReLU()}, "modules").is_model("b")
    assert not Holder("", {}).is_model("a")


def test_another_variable_of_a_module():
    holder = Names("m.", {"a": 1, "b": 2}, names={"a"})
    assert not holder.add("a")
    assert holder.add("b")
    assert holder.copy() == {"a": 1, "b": 2}
    assert holder.change("b").name == "m.b"


def test_memory_that_was_given_back():
    x = nn.Parameter(torch.ones(2))
    assert not is_freed(x)
    x.untyped_storage().resize_(0)
    assert is_freed(x)
    assert not is_freed(torch.empty(0))
    assert not is_freed(torch.ones(2, device="meta"))
