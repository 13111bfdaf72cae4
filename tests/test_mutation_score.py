"""The tests catch most of the mutants that a tool draws: see tests/support/mutation_score.py."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import mutation_score as scores
from tests.support.equivalent_mutants import EQUIVALENT

WORDS = "dp_clipping/sampling/words.py"
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
        own, others = scores.tests_of(file)
        assert own or others
        assert all((scores.ROOT / name).is_file() for name in (*own, *others))


def test_mutants_are_drawn_again_alike_and_change_what_runs():
    pytest.importorskip("cosmic_ray")
    drawn = scores.draw(8, [WORDS])
    assert drawn == scores.draw(8, [WORDS])
    assert len({mutant.line for mutant in drawn}) > 1
    source = (scores.ROOT / WORDS).read_text()
    for mutant in drawn:
        changed = mutant.apply(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        with pytest.raises(ValueError, match="draw the mutants anew"):
            mutant.apply(changed)


def test_what_is_no_mutant():
    source = "def f(x: int | None) -> int:\n    raise ValueError('a' + 'b')\n"
    for same in (source.replace("|", "+"), source.replace("'a' + 'b'", "'a' - 'b'")):
        assert scores.meaning(same) == scores.meaning(source)
    assert scores.meaning(source.replace("raise ", "")) != scores.meaning(source)
    assert scores.meaning("def f(:") is None


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
