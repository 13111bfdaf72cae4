"""Interleaved cells and their results: one that fails says why, and the others go on."""

from collections import Counter

import pytest
import torch

from experiments.rounds import Recorder, Row, attempt, describe_cell, interleave, row_of
from measure.runs import beside, ratio_beside, read_cells

CONFIG = {"config": {"model": "tiny"}}


def test_variants_of_a_row_take_turns():
    cells = interleave([Row(8, 16), "mlp"], ["a", "b"], 3)
    assert [str(cell.row) for cell in cells] == ["8x16"] * 6 + ["mlp"] * 6
    assert [cell.round for cell in cells[:6]] == [0, 0, 1, 1, 2, 2]
    assert set(Counter(cell.variant for cell in cells).values()) == {6}
    assert cells[0].names() == {"row": "8x16", "variant": cells[0].variant, "round": 0}


def test_a_row_is_written_as_it_is_read():
    assert row_of("8x1024") == Row(8, 1024)
    assert str(row_of("8x1024")) == "8x1024"


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("no room\nat all"), "oom"), (KeyError("x"), "error")],
)
def test_a_failed_cell_says_why(error, status):
    def fail():
        raise error

    found = attempt(fail)
    assert found["status"] == status
    assert found["reason"].startswith(type(error).__name__)
    assert "\n" not in found["reason"]
    cell = {"row": "8x16", "variant": "a", "round": 0} | found
    assert describe_cell(cell) == f"8x16 a round 1: {status}: {found['reason']}"


def test_the_file_is_read_as_other_results_are(tmp_path, capsys):
    recorder = Recorder(tmp_path / "new" / "out.json")
    for cell in interleave(["8x16"], ["ordinary", "flash", "lost"], 2):
        ms = {"ordinary": 10.0, "flash": 15.0}
        costs = {"step_ms": [ms.get(cell.variant)] * 3, "peak_memory_mb": 7.0}
        measured = attempt(lambda costs=costs: {"a": 1 / (costs["step_ms"][0] or 0), **costs})
        recorder.add(cell.names() | CONFIG | measured, "a line")
    assert capsys.readouterr().out == "a line\n" * 6
    cells = {cell.names["variant"]: cell for cell in read_cells(tmp_path / "new" / "out.json")}
    flash, lost = cells["flash"], cells["lost"]
    assert flash.samples() == [15.0] * 6
    assert (flash.peak_memory_mb, flash.settings) == (7.0, {"model": "tiny"})
    ordinary = beside(list(cells.values()), flash, "variant", "ordinary")
    assert ratio_beside(flash, ordinary).value == pytest.approx(1.5)
    assert (lost.status, lost.reason) == ("error", "ZeroDivisionError: division by zero")
