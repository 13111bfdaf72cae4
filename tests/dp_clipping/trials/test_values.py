"""Values of tensors from before they are written to are compared and put back."""

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.trials import values as values_file
from dp_clipping.trials.values import Values, checksum, copied_bytes, equal, others

WRITES = {
    "add_": lambda x: x.add_(1),
    "a view": lambda x: x[0].fill_(7),
    "data": lambda x: x.data.mul_(3),
    "out": lambda x: torch.add(x, 1, out=x),
    "other memory": lambda x: setattr(x, "data", x * 2),
    "other order": lambda x: x.data.copy_(x.flip(0)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
@torch.no_grad()
def test_a_write_is_seen_and_put_back(kind, write):
    values = torch.arange(1.0, 4.0)
    one, other = kind(values.clone()), torch.ones(2)
    kept = Values([one, other])
    WRITES[write](one)
    assert kept.changed() == [0]
    assert kept.put_back() == [0]
    assert torch.equal(one, values)
    assert kept.put_back() == []


def test_a_write_of_the_same_values_is_none():
    one = torch.ones(3)
    kept = Values([one])
    one.fill_(1)
    assert kept.put_back() == []


@pytest.mark.parametrize(
    "write", [lambda x: x.data.add_(1), lambda x: x.copy_(x.flip(0))], ids=["data", "same sum"]
)
@torch.no_grad()
def test_parameters_may_be_compared_and_not_copied(write):
    one = nn.Parameter(torch.arange(3.0))
    kept = Values([one], with_parameters=False)
    write(one)
    assert kept.put_back() == [0]
    assert not torch.equal(one, torch.arange(3.0))


def test_not_a_number_is_equal_to_itself():
    nan = torch.tensor([1.0, torch.nan])
    kept = Values([nan])
    assert kept.changed() == []
    assert equal(nan, nan.clone())
    assert not equal(nan, torch.tensor([torch.nan, 1.0]))
    assert not equal(nan, nan.double())
    assert not equal(nan, nan[:1])


@pytest.mark.parametrize("changed", [(), (0,), (1,), (2, 4), (0, 1, 2, 3, 4)], ids=str)
def test_others_are_those_that_changed(changed):
    """Looks at short tensors of several dtypes together, and at long ones alone."""
    dtypes = torch.int64, torch.int32, torch.uint8, torch.int16, torch.int64
    before = [
        torch.arange(n, dtype=dtype) for n, dtype in zip((3, 9, 2, 1, 8), dtypes, strict=True)
    ]
    now = [x + (n in changed) for n, x in enumerate(before)]
    with patch.object(values_file, "SHORT", 4):
        assert others(before, now) == [n in changed for n in range(5)]
    assert others(before, now) == [n in changed for n in range(5)]
    assert others([], []) == []


def test_a_row_of_any_stride_has_a_checksum():
    one = torch.arange(6, dtype=torch.int32).as_strided((1, 6), (1, 1))
    assert torch.equal(checksum(one), checksum(one.clone().view(1, 6)))
    assert not torch.equal(checksum(one), checksum(one + 1))


@pytest.mark.parametrize("shape", [(5, 3), (4, 3), (1, 3), (6, 2), (3, 0), (5, 2, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_each_number_is_in_a_checksum(shape, dtype):
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).to(dtype)
    before = checksum(x)
    for place in range(x.numel()):
        changed = x.clone()
        changed.view(-1)[place] += 1
        assert not torch.equal(checksum(changed), before)
    if len(x) > 1 and x.numel():
        assert not torch.equal(checksum(x.roll(1, 0)), before)


@pytest.mark.parametrize(
    "x",
    [torch.arange(6.0).view(2, 3).t(), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(True),
     torch.ones(3, dtype=torch.complex64).conj()],
    ids=["transposed", "bfloat16", "bool", "conjugate"],
)  # fmt: skip
def test_bytes_are_copies_and_leave_memory_as_it_was(x):
    expected = bytes(x.resolve_conj().contiguous().untyped_storage())
    assert copied_bytes(x).tobytes() == expected
    assert x.untyped_storage().resizable()
