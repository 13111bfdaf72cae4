"""Values of tensors from before they are written to are kept and put back."""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.capture.checks.places import Named, Place
from dp_clipping.capture.checks.writes import Values, Writes, equal


def named(tensor: Tensor) -> Named:
    return Named(tensor, Place("net.", {"x": tensor}), "x")


WRITES = {
    "add_": lambda x: x.add_(1),
    "a view": lambda x: x[0].fill_(7),
    "data": lambda x: x.data.mul_(3),
    "out": lambda x: torch.add(x, 1, out=x),
    "other memory": lambda x: setattr(x, "data", x * 2),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", [Writes, Values])
def test_a_write_is_seen_and_put_back(kind, write):
    one, other = named(torch.arange(1.0, 4.0)), named(torch.ones(2))
    kept = kind([one, other])
    if kind is Writes:
        with kept:
            WRITES[write](one.tensor)
    else:
        WRITES[write](one.tensor)
    assert kept.put_back() == [one]
    assert torch.equal(one.tensor, torch.arange(1.0, 4.0))


def test_a_write_of_the_same_values_is_none():
    one = named(torch.ones(3))
    with (kept := Writes([one])):
        one.tensor.fill_(1)
    assert kept.put_back() == []


def test_parameters_are_compared_and_not_copied():
    one = named(nn.Parameter(torch.ones(3)))
    kept = Values([one])
    one.tensor.data.add_(1)
    assert kept.put_back() == [one]
    assert torch.equal(one.tensor, torch.full((3,), 2.0))


def test_not_a_number_is_equal_to_itself():
    nan = torch.tensor([1.0, torch.nan])
    assert equal(nan, nan.clone())
    assert not equal(nan, torch.tensor([torch.nan, 1.0]))
    assert not equal(nan, nan.double())
    assert not equal(nan, nan[:1])
