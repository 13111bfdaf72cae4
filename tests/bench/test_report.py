"""From rows of results to table, picture and exit status, without a run."""

import errno
import json

import pytest

from ddp_by_hand.bench.report import report
from ddp_by_hand.bench.settings import settings_from
from ddp_by_hand.bench.worker import GATE, TIMING, plan
from ddp_by_hand.measure import Results
from tests.support.benchmark_command import parse

NAMES = ["none", "ddp", "torch_ddp"]
STEPS = {"none": 100.0, "ddp": 150.0, "torch_ddp": 120.0}


@pytest.fixture
def settings(tmp_path):
    return settings_from(parse(["--implementations", *NAMES]), "cpu", tmp_path)


@pytest.fixture
def pictures(monkeypatch):
    drawn = []
    monkeypatch.setattr("ddp_by_hand.bench.memory.draw_memory", lambda *_, **__: None)
    monkeypatch.setattr(
        "ddp_by_hand.bench.report.draw_comparison", lambda rows, *_, **__: drawn.append(rows)
    )
    return drawn


def record(settings, device="cpu", **changes):
    """All cells of a run of two ranks; `changes` maps a name to what is different in its rows."""
    for cell in plan(settings):
        timed = {"step_ms": [STEPS[cell.subject.implementation]] * 6, "peak_memory_bytes": 3 << 20,
                 "collectives": 2, "bytes": 1 << 20}  # fmt: skip
        measured = {"gradient_error": 1e-7} if cell.kind == GATE else timed
        row = {**cell.row(settings, 2, device), "status": "ok", "invocation": "x", **measured}
        change = changes.get(cell.subject.implementation, {})
        Results(settings.output_dir).record({**row, **change.get(cell.kind, {})})


def line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{name} "))


def test_the_numbers_of_a_row(settings, pictures):
    record(settings)
    text, status = report(settings, 2, "cpu")
    assert status == 0
    tokens = 2 * 8 * 128
    assert line(text, "ddp").split() == [
        *("ddp", "1.0e-07", "150.0", "[150.0,", "150.0]", f"{tokens / 0.15:,.0f}", "50.00"),
        *("1.500", "1.250", "[1.250,", "1.250]", "2", "1.0", "3"),
    ]
    assert "MFU" not in text
    assert text.startswith("2 ranks on cpu, 8 sequences of 128 tokens")
    (rows,) = pictures
    assert [row["label"] for row in rows] == NAMES
    assert rows[1]["ratio_to_reference"] == pytest.approx((1.25, 1.25, 1.25))
    assert report(settings, 1, "cpu")[0].startswith("1 rank on cpu, ")


@pytest.mark.parametrize("error", [1.0, float("nan"), float("inf")])
def test_a_wrong_gradient_is_said_everywhere(settings, pictures, error):
    """JSON has no infinity: such an error comes back as null."""
    record(settings, ddp={GATE: {"gradient_error": error}})
    text, status = report(settings, 2, "cpu")
    assert status == 1
    assert "WRONG" in line(text, "ddp")
    assert "WRONG" not in line(text, "none")
    assert pictures[0][1]["label"] == "ddp (WRONG)"


@pytest.mark.parametrize(("status", "bad"), [("oom", 1), ("error", 1), ("unavailable", 0)])
def test_a_failed_cell_is_a_row_with_its_reason(settings, pictures, status, bad):
    record(settings, ddp={"timing": {"status": status, "reason": "rank 1: why"}})
    text, exit_status = report(settings, 2, "cpu")
    assert exit_status == bad
    assert f"{status}: rank 1: why" in line(text, "ddp")


def test_what_was_not_measured_is_said(settings, pictures):
    text, status = report(settings, 2, "cpu")
    assert (status, text.count("missing: not measured yet")) == (1, 3)
    record(settings)
    text, _ = report(settings, 4, "cpu")
    assert text.count("missing") == 3


def test_mfu_where_the_peak_is_known(settings, pictures):
    record(settings, device="NVIDIA H200")
    text, _ = report(settings, 2, "NVIDIA H200")
    assert "MFU" in text.splitlines()[2]
    assert line(text, "none").endswith("%")


def test_a_busy_machine_is_said(settings, pictures):
    record(settings)
    assert "machine was busy" not in report(settings, 2, "cpu")[0]
    record(settings, none={TIMING: {"step_ms": [100.0, 100.0, 100.0, 300.0, 300.0, 300.0]}})
    text, _ = report(settings, 2, "cpu")
    assert "The machine was busy: steps of none took 100 to 300 ms" in text


def test_the_table_is_printed_before_a_picture_that_cannot_be_written(
    settings, monkeypatch, capsys
):
    def full(*_, **__):
        assert "150.0 [150.0, 150.0]" in capsys.readouterr().out
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ddp_by_hand.bench.report.draw_comparison", full)
    record(settings)
    assert report(settings, 2, "cpu")[1] == 1
    path = settings.output_dir / "comparison.png"
    memory = f"picture: {settings.output_dir / 'memory.png'}\n"
    assert capsys.readouterr() == (
        memory, f"{path}: cannot be written (No space left on device)\n"
    )  # fmt: skip


def test_rows_that_no_file_has_are_in_the_table_and_in_the_exit_status(settings, pictures):
    record(settings)
    path = settings.output_dir / "results.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    path.write_text("")
    text, status = report(settings, 2, "cpu", rows)
    assert (status, text.count("missing")) == (1, 0)
    assert "150.0 [150.0, 150.0]" in text
