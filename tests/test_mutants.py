"""The tests catch the usual mistakes: see tests/support/mutants.py."""

import pytest

from tests.support.mutants import MUTANTS, PRIVATE_MUTANTS, ROOT, Mutant, caught_by

ALL = [*MUTANTS, *PRIVATE_MUTANTS]


def test_what_a_mutant_changes_is_there():
    """Once, in private training."""
    for mutant in ALL:
        for file, text, replacement in mutant.changes:
            count = (ROOT / file).read_text().count(text)
            assert count == 1 or (count and mutant in MUTANTS), mutant.name
            assert text != replacement, mutant.name
        assert (ROOT / mutant.tests[0]).exists(), mutant.name


def test_there_are_enough_of_different_names():
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_every_mutant_is_caught(mutant: Mutant):
    assert caught_by(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in ALL}), ids=" ".join)
def test_the_tests_pass_without_a_mutant(tests: tuple[str, ...]):
    """In the same kind of copy: what fails there is the mutant's doing."""
    assert not caught_by(Mutant("none", (), tests))
