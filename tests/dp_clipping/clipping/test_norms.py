"""Norms by parameter: sums over clipping groups, and allowances for rounding."""

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.clipping.norms import Norm, Norms
from tests.dp_clipping.conftest import trained


@pytest.fixture
def parameters():
    return [trained(Parameter(torch.zeros(1))) for _ in range(3)]


def of(parameters, groups, count, *norms: Norm) -> Norms:
    found = Norms(count, torch.zeros(2))
    for parameter, group in zip(parameters, groups, strict=True):
        parameter.group = group
    for parameter, norm in zip(parameters, norms, strict=False):
        found.add(parameter, norm)
    return found


def squares(*values: float) -> torch.Tensor:
    return torch.tensor(values)


INF, NAN = torch.inf, torch.nan
SUMS = {  # groups, a norm of each parameter, squared norms and their bounds of each group
    "all": ([0, 0, 0], [((n, 2 * n),) for n in (1.0, 4.0, 16.0)], [[21.0, 42.0]], [[21.0, 42.0]]),
    "groups": ([1, 0, 1], [((n, n),) for n in (1.0, 4.0, 16.0)], [[4.0] * 2, [17.0] * 2],
               [[4.0] * 2, [17.0] * 2]),
    "both allowances, (√(n² + e·S²) + f·S)²": (
        [0], [((7.0, 0.0), (3.0, 2.0), 1.0, 0.5)], [[7.0, 0.0]], [[5.5**2, 3.0**2]]),
    "an allowance of its own parameter": (
        [0, 1], [((4.0, 4.0),), ((0.0, 0.0), (2.0, 2.0), 1.0)], [[4.0] * 2, [0.0] * 2],
        [[4.0] * 2] * 2),
    "below zero, and infinite": (
        [0, 0], [((-1.0, -INF),), ((4.0, 4.0),)], [[4.0, INF]], [[4.0, INF]]),
    "not a number": ([0], [((NAN, 1.0),)], [[NAN, 1.0]], [[NAN, 1.0]]),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "given", "squared", "bounds"), SUMS.values(), ids=SUMS)
def test_sums_over_groups_and_what_rounding_may_add(parameters, groups, given, squared, bounds):
    each = [Norm(squares(*n), *(squares(*s) for s in rest[:1]), *rest[1:]) for n, *rest in given]
    norms = of(parameters[: len(groups)], groups, max(groups) + 1, *each)
    torch.testing.assert_close(norms.squared(), torch.tensor(squared), equal_nan=True)
    torch.testing.assert_close(norms.bounds(), torch.tensor(bounds), equal_nan=True)


def test_a_part_leaves_the_whole_as_it_is(parameters):
    norms = of(parameters, [0, 0, 0], 1, *(Norm(squares(n, n)) for n in (1.0, 4.0, 16.0)))
    assert norms.only({parameters[1]}).squared().tolist() == [[4.0, 4.0]]
    assert norms.only(set()).squared().tolist() == [[0.0, 0.0]]
    assert norms.squared().tolist() == [[21.0, 21.0]]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_part_of_nothing_has_the_dtype_of_the_whole(parameters, dtypes):
    """Ranks add their parts up, and another rank's may not be empty."""
    norms = of(parameters[:2], [0, 0], 1, *(Norm(squares(1.0, 1.0).to(d)) for d in dtypes))
    assert norms.only(set()).squared().dtype == norms.squared().dtype == torch.float64
