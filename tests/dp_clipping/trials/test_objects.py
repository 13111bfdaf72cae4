"""Places that hold values: what has changed there, and what is put back."""

from collections import deque
from functools import partial

import pytest
import torch
from torch import nn

from dp_clipping.trials.objects import Places, is_freed
from dp_clipping.trials.places import Place

PLACES = {
    "dict": ({"held": 1, "other": 2}, lambda v: v.update(held=5), ["held"]),
    "dict that grows": ({"a": 1}, lambda v: v.update(b=2), ["b"]),
    "list": ([1, 2], lambda v: v.append(3), [None]),
    "deque": (deque([1], maxlen=1), lambda v: v.append(3), [None]),
    "set": ({1}, lambda v: v.add(2), [None]),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_change_is_seen_and_put_back(case):
    values, change, keys = PLACES[case]
    place = Place("x.", values.copy())
    before = place.copy()
    change(place.values)
    assert place.changed(before) == keys
    place.put_back(before)
    assert not place.changed(before)
    assert place.values == values


def test_equal_numbers_are_no_change():
    place = Place("x.", {"a": 1000.0})
    before = place.copy()
    place.values["a"] = float("1000")
    assert not place.changed(before)


def test_what_belongs_to_the_model():
    net = nn.BatchNorm1d(2)
    net.register_buffer("cache", None, persistent=False)
    held = Place("", dict(net.named_buffers()), "buffers", {"cache"})
    assert held.is_model("running_mean")
    assert not held.is_model("cache")
    assert Place("", {}, "parameters").is_model("weight")
    assert Place("", {"a": net, "b": nn.ReLU()}, "modules").is_model("a")
    assert not Place("", {"a": net, "b": nn.ReLU()}, "modules").is_model("b")
    assert not Place("", {}).is_model("a")


class Tracker:
    def __init__(self):
        self.means = [torch.zeros(2)]


def test_what_attributes_lead_to_is_found_and_what_functions_hold_is_not():
    net, inside, outside = nn.Linear(2, 2), Tracker(), Tracker()
    net.inside, net.method = inside, partial(print, inside.means)
    net.function = lambda: outside
    found = [named.tensor for named in Places(net).tensors]
    assert any(x is inside.means[0] for x in found)
    assert not any(x is outside.means[0] for x in found)


def test_memory_that_was_given_back():
    x = nn.Parameter(torch.ones(2))
    assert not is_freed(x)
    x.untyped_storage().resize_(0)
    assert is_freed(x)
    assert not is_freed(torch.empty(0))
    assert not is_freed(torch.ones(2, device="meta"))
