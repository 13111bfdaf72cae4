"""Opacus's own tests of per-sample gradients, on our engine: each case is right, and none refused.

The tests are those of the installed Opacus; see `tests.support.opacus_suite`.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from dp_clipping.step.sums.plain import Plain
from tests.support import opacus_suite
from tests.support.opacus_suite import MODES, Case, Expected, Run

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False")

FEW = ("ghost", "flash_bookkeeping")  # a mode with two backwards, and the default


def assert_right(run: Run) -> None:
    """Fails if a comparison is wrong, raises an error or is refused: none is."""
    failures = [one for one in run.comparisons if one.outcome != "right"]
    kinds = Counter((one.mode, one.outcome, one.said) for one in failures).most_common(10)
    assert not failures, f"{len(failures)} of {len(run.comparisons)}: {kinds}"


@pytest.mark.slow
@pytest.mark.parametrize("name", opacus_suite.tests())
def test_all_cases(name):
    run = Run()
    run.run(name, opacus_suite.tests()[name])
    assert_right(run)
    assert len(run.comparisons) >= 40 * len(MODES)


@pytest.mark.parametrize("name", opacus_suite.tests())
def test_some_cases(name):
    run = Run(FEW, every=40)
    run.run(name, opacus_suite.tests()[name])
    assert_right(run)
    assert run.comparisons


@pytest.mark.parametrize("name", opacus_suite.norm_tests())
@pytest.mark.parametrize("mode", MODES)
def test_norms_of_embeddings(name, mode):
    with opacus_suite.our_norms(mode):
        opacus_suite.norm_tests()[name]()


def test_nothing_that_compares_is_left_out():
    kinds = {name.partition(".")[0] for name in opacus_suite.tests()}
    assert len(kinds) == 15


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_gradient_is_seen(mode, monkeypatch):
    """A bias whose gradient is twice what it should be."""
    each = Plain._each
    case = Case(torch.randn(3, 4), nn.Linear(4, 2), True, "mean", iter)
    checks = opacus_suite.GradSampleHooks_test()

    def check(expected, found):
        checks.check_shapes(expected, found, "mean")
        checks.check_values(expected, found, "mean", 1e-5, 1e-4)

    Expected.of(case).compare(mode, check)

    def doubled(self, lefts):
        return [
            (record, 2 * value if len(record.shape) == 1 else value, left)
            for record, value, left in each(self, lefts)
        ]

    monkeypatch.setattr(Plain, "_each", doubled)
    with pytest.raises(AssertionError, match="norms"):
        Expected.of(case).compare(mode, check)
