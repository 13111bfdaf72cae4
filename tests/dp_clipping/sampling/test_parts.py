"""Parts of a batch are known to have different rows if they are slices of one tensor."""

import math

import pytest
import torch

from dp_clipping.sampling.parts import apart, slices_of
from dp_clipping.torch_compat import version_of


def part(*tensors, dim=0):
    rows = ((x, dim if x.dim() > 1 else 0) for x in tensors)
    return slices_of(rows, list(map(version_of, tensors)))


X, OTHER = torch.randn(6, 4, 3), torch.randn(6, 4, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (part(X[:2]), part(X[2:4])),
        (part(X[4:6]), part(X[:2])),
        (part(X[0:1, :, 1:]), part(X[1:2, :, 1:])),
        (part(X.view(6, 12)[:2]), part(X.view(6, 12)[2:4])),
        (part(X.view(6, 12)[:2, 3:]), part(X.view(6, 12)[4:6, 3:])),
        (part(X[:, :2], dim=1), part(X[:, 2:], dim=1)),
        (part(X[2:, :2], dim=1), part(X[2:, 2:], dim=1)),
        (part(X[:2], OTHER[:2]), part(X[2:4], OTHER[2:4])),
        (part(X[:2, :-1], X[:2, 1:]), part(X[2:4, :-1], X[2:4, 1:])),  # tokens and the next ones
        (part(X[:2].real), part(X[2:4].real)),
    ],
)
def test_different_rows(one, other):
    assert apart(one, other)
    assert apart(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (part(X[:3]), part(X[2:5])),
        (part(X[:2]), part(X[:2])),
        (part(X[:2]), part(OTHER[2:4])),
        (part(X[[0, 1]]), part(X[[2, 3]])),  # copies: which rows they were is not known
        (part(X[:2, :, :2]), part(X[2:4, :, 1:])),  # other columns
        (part(X[:2]), part(X.view(6, 12)[2:4])),
        (part(X[:2].view(torch.int32)), part(X[2:4])),
        (part(X[:4, :2], dim=1), part(X[2:, 2:], dim=1)),  # other tokens
        (part(X[:4, :2], dim=1), part(X[1:5, :2], dim=1)),  # of the same samples
        (part(X[:1].view(12)[9:].view(1, 1, 3), dim=1), part(X[1:, :1], dim=1)),
        (part(X[:1].expand(3, 4, 3)), part(X[1:2].expand(3, 4, 3))),
        (part(X[:0]), part(X[2:4])),
        ((), part(X[2:4])),
        ((), ()),
        (part(X[:2], X[2:4]), part(X[2:4], X[:2])),  # pairs, each way round
        (part(X[:2], OTHER[:2]), part(X[[0, 1]], OTHER[2:4])),
        (part(X[:2], OTHER[:2].clone()), part(X[2:4], OTHER[2:4].clone())),
    ],
)
def test_rows_that_may_be_the_same(one, other):
    assert not apart(one, other)
    assert not apart(other, one)


def test_a_tensor_that_was_filled_again_has_other_rows_or_the_same_ones():
    buffer = torch.zeros(4, 2)
    before = part(buffer[:2])
    buffer.copy_(torch.ones(4, 2))
    assert not apart(before, part(buffer[2:]))


def test_parts_that_are_apart_have_no_element_in_common():
    """Slices of a tensor, which may begin anywhere in memory."""
    random = torch.Generator().manual_seed(0)

    def number(high):
        return int(torch.randint(high, (), generator=random))

    memory, found = torch.arange(100.0), 0
    for _ in range(4000):
        shape, dim, views = [1 + number(4) for _ in range(3)], number(3), []
        cut = [(number(n), 1 + number(n)) for n in shape]
        for _ in range(2):
            cut[dim] = number(shape[dim]), 1 + number(shape[dim])
            x = memory[(start := number(9)) : start + math.prod(shape)].view(shape)
            views.append(x[tuple(slice(begin, begin + length) for begin, length in cut)])
        one, other = (slices_of([(x, dim)], [0]) for x in views)
        if apart(one, other):
            found += 1
            assert not set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
    assert found > 100


def test_memory_of_a_part_is_not_given_to_another_tensor():
    x = torch.randn(1000)
    before, place = part(x[:500]), x.data_ptr()
    del x
    assert all(torch.empty(1000).data_ptr() != place for _ in range(20))
    assert len(before) == 1
