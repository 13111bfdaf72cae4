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


def test_squares_add_up_over_all_parameters(parameters):
    norms = of(parameters, [0, 0, 0], 1, *(Norm(squares(n, 2 * n)) for n in (1.0, 4.0, 16.0)))
    assert norms.squared().tolist() == [[21.0, 42.0]]
    torch.testing.assert_close(norms.bounds(), torch.tensor([[21.0, 42.0]]))


def test_each_group_has_its_own_sum(parameters):
    norms = of(parameters, [1, 0, 1], 2, *(Norm(squares(n, n)) for n in (1.0, 4.0, 16.0)))
    assert norms.squared().tolist() == [[4.0, 4.0], [17.0, 17.0]]


def test_a_bound_has_both_allowances(parameters):
    """(√(n² + e·S²) + f·S)²."""
    norms = of(parameters[:1], [0], 1, Norm(squares(7.0, 0.0), squares(3.0, 2.0), 1.0, 0.5))
    torch.testing.assert_close(norms.bounds(), torch.tensor([[5.5**2, 3.0**2]]))
    assert norms.squared().tolist() == [[7.0, 0.0]]


def test_an_allowance_is_of_its_own_parameter(parameters):
    plain, wide = Norm(squares(4.0, 4.0)), Norm(squares(0.0, 0.0), squares(2.0, 2.0), 1.0)
    assert of(parameters[:2], [0, 1], 2, plain, wide).bounds().tolist() == [[4.0] * 2, [4.0] * 2]


def test_what_rounding_left_below_zero_is_zero_and_infinities_stay(parameters):
    norms = of(parameters[:2], [0, 0], 1, Norm(squares(-1.0, -torch.inf)), Norm(squares(4.0, 4.0)))
    assert norms.squared().tolist() == [[4.0, torch.inf]]


def test_a_nan_is_no_norm(parameters):
    norms = of(parameters[:1], [0], 1, Norm(squares(torch.nan, 1.0)))
    assert not norms.bounds()[0, 0].isfinite()
    assert norms.bounds()[0, 1] == 1


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
