"""Sums on a grid, with integers of it."""

import numpy as np
import pytest
import torch

from dp_clipping.distributed.placement import spans_of
from dp_clipping.noise.kernel import StreamTable
from dp_clipping.noise.secure.certificate import grid_of
from dp_clipping.noise.secure.rounded_gaussian import values_at
from dp_clipping.noise.secure.source import SecureNoise, stream_keys

KEY = bytes(range(32))
HOW = {"key": KEY, "step": 5, "std": 2.0, "divisor": 8.0}
SIZE = 96


def add(total, names=("w",), dtypes=(torch.float32,), **changes):
    (found,) = SecureNoise(SIZE).add(
        [total.clone()], list(names), dtypes=list(dtypes), **{**HOW, **changes}
    )
    return found


def test_the_result_is_an_integer_of_the_grid_and_no_more():
    """Two sums that round to one integer give one result, in all bits."""
    grid = grid_of(2.0, SIZE)
    total = torch.randn(SIZE)
    near = (total / grid).round() * grid + 0.3 * grid
    assert torch.equal(add((total / grid).round() * grid), add(near))
    integers = add(total, divisor=1.0).double() / grid
    assert torch.equal(integers, integers.round())


def test_its_integers_are_those_of_the_address():
    grid = grid_of(2.0, SIZE)
    (own,) = stream_keys(KEY, 5, ["w"])
    expected = values_at(own, np.arange(SIZE), 2.0 / grid)
    found = add(torch.zeros(SIZE), divisor=1.0).double().numpy() / grid
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(add(torch.zeros(SIZE), step=6), found * grid / 8)
    assert not np.array_equal(add(torch.zeros(SIZE), names=["v"]), found * grid / 8)


def test_a_part_gets_the_noise_of_its_place():
    whole = add(torch.zeros(8, 12))
    place = spans_of(((2, 3), (4, 5)), (8, 12))
    assert torch.equal(add(torch.zeros(3, 5), places=[place]), whole[2:5, 4:9])


def test_no_noise():
    total = torch.randn(5)
    assert torch.equal(add(total, std=0.0), total / 8)


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"network\.float\(\)"):
        add(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="leave out cuda_graph"):
        add(torch.zeros(3), table=StreamTable(1, torch.device("cpu")))
    with pytest.raises(ValueError, match="31 bytes"):
        stream_keys(KEY[1:], 0, ["w"])
