"""What a check has found: errors, a verdict, a table."""

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.trials.tolerances import NORM, SUM
from dp_clipping.verification.report import Bounds, Check, gradient_errors, norm_errors


def report_of(size: int, **changes) -> Check:
    values = dict(
        norms=torch.ones(size), expected_norms=torch.ones(size, dtype=torch.float64),
        norm_errors=torch.arange(size).flip(0) * 1e-6, gradient_error=1e-5,
        worst_parameter="blocks.0.attention.query.weight", clipped=0.5, expected_clipped=0.5,
        tolerance=Bounds(NORM.four, SUM.four),
        setting=f"ghost, flat, {size} samples",
    )  # fmt: skip
    return Check(**values | changes)


def test_the_table():
    text = str(report_of(2))
    assert text.splitlines() == [
        "ghost, flat, 2 samples",
        "",
        "                              private  one by one    error",
        "----------------------------  -------  ----------  -------",
        "norm of sample 0                    1           1  1.0e-06",
        "norm of sample 1                    1           1  0.0e+00",
        "samples clipped                 50.0%       50.0%        –",
        "samples not finite                  0           0        –",
        "clipped sum, worst parameter                       1.0e-05",
        "",
        "worst parameter: blocks.0.attention.query.weight",
        "ok: norms agree within 1.0e-04, clipped sums within 2.0e-04",
        "Dropout was off. Not covered by ε: for you to look at, not to publish.",
    ]


def test_the_table_of_a_large_batch_shows_the_worst():
    report = report_of(500, norm_errors=torch.arange(500) * 1e-6)
    lines = str(report).splitlines()
    assert lines[0] == "ghost, flat, 500 samples; 492 norms that are closer left out"
    assert [line for line in lines if line.startswith("norm of sample 499")]
    assert not [line for line in lines if line.startswith("norm of sample 491")]
    assert "FAIL: the norm of sample 499 is off by 5.0e-04 (at most 1.0e-04)" in lines
    assert not [line for line in lines if line.startswith("ok")]
    assert all(len(line) <= 100 and line == line.rstrip() for line in lines)


def test_errors_of_norms_are_relative_and_small_norms_are_compared_with_the_whole():
    found = torch.tensor([[2.0, 1e-6, torch.inf, torch.inf]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 0.0, torch.inf, 1.0]], dtype=torch.float64)
    errors = norm_errors(found, expected, torch.tensor([0.5], dtype=torch.float64), 1e-3)
    assert errors.tolist() == [pytest.approx(1 / (1 + 5e-4)), pytest.approx(2e-3), 0.0, torch.inf]


def test_the_worst_group_of_a_sample_counts():
    found, expected = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1)
    assert norm_errors(found, expected, torch.ones(2), 0.0).tolist() == [2.0]


def test_errors_of_sums_are_relative_to_each_parameter_and_a_floor():
    one, other, unused = (Parameter(torch.zeros(2)) for _ in range(3))
    expected = {one: torch.tensor([3.0, 4.0]), other: torch.zeros(2), unused: torch.zeros(2)}
    found = {one: torch.tensor([3.0, 4.5]), other: torch.tensor([0.0, 0.1]), unused: None}
    errors = gradient_errors(found, expected, 1e-2)
    assert errors[one] == pytest.approx(0.5 / 5.05)
    assert errors[other] == pytest.approx(0.1 / 0.05)
    assert errors[unused] == 0.0


@pytest.mark.parametrize(
    ("margin", "error"), [(0.0, 0.1), (0.2, 0.06), (0.5, 0.0), (torch.inf, 0.1), (torch.nan, 0.1)]
)
def test_errors_of_sums_are_beyond_their_margin(margin, error):
    parameter = Parameter(torch.zeros(2))
    found, expected = {parameter: torch.tensor([3.0, 4.5])}, {parameter: torch.tensor([3.0, 4.0])}
    errors = gradient_errors(found, expected, 0.0, {}, {parameter: margin})
    assert errors[parameter] == pytest.approx(error)


def test_a_sum_that_is_not_a_number_is_wrong():
    parameter = Parameter(torch.zeros(1))
    errors = gradient_errors({parameter: torch.tensor([torch.nan])}, {parameter: torch.ones(1)}, 0)
    assert errors[parameter] == torch.inf
