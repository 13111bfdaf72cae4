"""The tests catch most of the mutants that a tool draws: see tests/support/mutation_score.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import mutation_score as scores
from tests.support.equivalent_mutants import EQUIVALENT

SAMPLE, MOST_SURVIVORS = 10, 2


def test_equivalent_mutants_are_few_and_have_reasons():
    assert len(EQUIVALENT) <= 0.03 * scores.DRAWN
    for (file, before, after), reason in EQUIVALENT.items():
        assert before in (scores.ROOT / file).read_text(), f"{file} no longer has {before!r}"
        assert before != after
        assert len(reason) > 20


def test_each_room_has_files_and_each_file_tests():
    files = scores.files()
    assert {room for room in scores.WIDER if any(f.startswith(room) for f in files)} == {
        *scores.WIDER
    }
    for file in files:
        lists = scores.tests_of(file)
        assert lists
        assert all((scores.ROOT / name).is_file() for tests in lists for name in tests)


@pytest.mark.slow
def test_a_change_of_nothing_survives_and_a_sample_of_mutants_does_not(tmp_path: Path):
    pytest.importorskip("cosmic_ray")
    drawn = scores.draw(SAMPLE)
    first = drawn[0]
    same = replace(first, operator="Nothing", after=first.before)
    results = tmp_path / "results.jsonl"
    scores.run_all([same, *drawn], results, processes=2, seconds=3000)
    assert scores.score([same], results)[:2] == (0, 1)
    killed, survived, equivalent, alive = scores.score(drawn, results)
    assert killed + survived + equivalent == SAMPLE
    assert survived <= MOST_SURVIVORS, [line["key"] for line in alive]
