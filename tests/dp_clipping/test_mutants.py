"""The tests catch the usual mistakes of private training: see tests/support/mutants.py."""

import pytest

from tests.support.mutants import (
    MUTANTS,
    PRIVATE_MUTANTS,
    ROOT,
    Mutant,
    caught_by,
    path_of,
    run_tests,
)

name_of = {"ids": lambda mutant: mutant.name.replace(" ", "-")}


def test_what_a_mutant_changes_is_there_once():
    for mutant in PRIVATE_MUTANTS:
        for file, text, replacement in mutant.changes:
            assert path_of(file).read_text().count(text) == 1, mutant.name
            assert text != replacement, mutant.name
        assert (ROOT / mutant.tests[0]).exists(), mutant.name


def test_what_the_others_change_is_there():
    for mutant in MUTANTS:
        for file, text, _ in mutant.changes:
            assert text in path_of(file).read_text(), mutant.name


def test_there_are_enough_of_different_names():
    mutants = [*MUTANTS, *PRIVATE_MUTANTS]
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("mutant", PRIVATE_MUTANTS, **name_of)
def test_every_mutant_is_caught(mutant: Mutant):
    assert caught_by(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("tests", sorted({m.tests for m in PRIVATE_MUTANTS}), ids=" ".join)
def test_the_tests_pass_without_a_mutant(tests: tuple[str, ...]):
    """In the same kind of copy: what fails there is the mutant's doing."""
    assert "FAILED" not in run_tests((), tests)
