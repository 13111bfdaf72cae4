"""The behaviour tests catch the usual mistakes: see mutants.py."""

import pytest

from tests.support.mutants import MUTANTS, Mutant, caught_by, run_tests


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_every_mutant_is_caught(mutant: Mutant):
    assert caught_by(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("tests", sorted({m.tests for m in MUTANTS}), ids=" ".join)
def test_the_tests_pass_without_a_mutant(tests: tuple[str, ...]):
    """In the same kind of copy: what fails there is the mutant's doing."""
    assert "FAILED" not in run_tests((), tests)
