"""Predicted memory: the table that --dry-run prints, and the picture beside what was measured."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_by_hand.bench.main import main
from ddp_by_hand.bench.memory import describe_memory, draw_predicted, machine_memory, predictions
from ddp_by_hand.bench.report import columns, comparison
from ddp_by_hand.bench.settings import settings_from
from ddp_by_hand.bench.worker import GATE, plan
from ddp_by_hand.lm.memory import predict_memory
from ddp_by_hand.measure import Results
from tests.support.benchmark_command import TINY, parse


@pytest.fixture
def dry_run(capsys, tmp_path):
    """Returns what a dry run of a tiny benchmark prints."""

    def printed(*arguments):
        line = [*TINY, "--output-dir", str(tmp_path), "--dry-run"]
        assert main([*line, "--implementations", *arguments]) == 0
        return capsys.readouterr().out

    return printed


def test_dry_run_prints_each_kind_and_the_peak(dry_run):
    printed = dry_run("none", "torch_ddp")
    title, _, table = printed.partition("predicted memory")[2].partition("\n")
    assert title == " at the peak of a step on 2 ranks, MiB per rank"
    cells = {
        line.split()[0]: line.split()[1:] for line in table.splitlines() if len(line.split()) > 5
    }
    assert cells["implementation"][0] == "parameters"
    assert "kinds at the moment of the peak: no activations if" in table
    *kinds, peak = map(float, cells["none"])
    parameters = int(re.search(r"model: ([\d,]+) parameters", printed)[1].replace(",", ""))
    mebibytes = 4 * parameters / 2**20
    assert kinds[0] == pytest.approx(mebibytes, abs=0.05)
    assert kinds[2] == pytest.approx(2 * mebibytes, abs=0.05)
    assert sum(kinds) == pytest.approx(peak, abs=0.3)
    assert float(cells["torch_ddp"][4]) == kinds[2]  # buckets, twice while they are rebuilt
    assert "  none: at least 1024 blocks, 0.00 B parameters" in printed


def test_the_largest_model_that_fits_a_machine(monkeypatch):
    monkeypatch.setattr("ddp_by_hand.bench.memory.machine_memory", lambda: 4 << 30)
    settings = settings_from(parse(["--implementations", "none", "zero1"]), "cpu", Path("unused"))
    *_, title, none, zero1 = describe_memory(settings, 4, "cpu", 2)  # of 4 ranks, 2 on this host
    assert title.startswith("largest that fits 4.0 GiB, which 2 ranks here share, without Python")
    for name, line in (("none", none), ("zero1", zero1)):
        found = int(re.fullmatch(rf"  {name}: (\d+) blocks, [\d.]+ B parameters", line)[1])
        run = {"ranks": 4, "batch_size": settings.batch_size, "on_gpu": False}
        run |= {"bucket_size_mb": settings.bucket_size_mb, "dtype": settings.dtype}
        fits, too_large = (
            sum(predict_memory(name, replace(settings.model, num_layers=n), **run).values())
            for n in (found, found + 1)
        )
        assert fits <= 2 << 30 < too_large


def test_the_memory_of_this_machine(monkeypatch):
    found = machine_memory()
    assert found > 2**27
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: "1048576\n")
    assert machine_memory() == 2**20
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: "max\n")
    assert machine_memory() >= found
    monkeypatch.delattr("os.sysconf")
    assert machine_memory() is None
    settings = settings_from(parse(["--implementations", "none"]), "cpu", Path("unused"))
    assert "not known" in describe_memory(settings, 2, "cpu", 2)[-1]


def test_what_is_not_predicted_is_named():
    settings = settings_from(parse(["--implementations", "none"]), "cpu", Path("unused"))
    settings = replace(settings, implementations=("none", "fsdp2", "own.py:Mine"))
    assert "not predicted, other code decides what is kept: fsdp2, own.py:Mine" in describe_memory(
        settings, 2, "cpu", 2
    )
    settings = replace(settings, implementations=("fsdp2",))
    assert describe_memory(settings, 2, "cpu", 2)[-1].startswith("not predicted")


def test_private_runs_and_compiled_blocks_are_not_predicted(dry_run):
    assert "predicted memory" not in dry_run("none", "--clipping", "bookkeeping")
    assert "memory is not predicted with --compile" in dry_run("none", "--compile")


NAMES = ("none", "zero1", "torch_fsdp", "fsdp2")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Bars and notes of the picture, for a run in which zero1 used 5 % more than predicted."""
    found = {}

    def draw(rows, path, title, notes):
        found.update({row["label"]: row for row in rows}, notes=" ".join(notes))

    monkeypatch.setattr("ddp_by_hand.bench.memory.draw_memory", draw)
    settings = settings_from(parse(["--implementations", *NAMES]), "cuda", tmp_path)
    known = predictions(settings, 2, on_gpu=True)
    assert list(known) == ["none", "zero1", "torch_fsdp"]
    for cell in plan(settings):
        name = cell.subject.implementation
        peak = sum(known.get(name, {}).values()) * (1.05 if name == "zero1" else 1.0)
        row = {**cell.row(settings, 2, "NVIDIA H200"), "status": "ok", "invocation": "x"}
        row |= {"gradient_error": 1e-7} if cell.kind == GATE else {
            "step_ms": [1.0] * 6, "peak_memory_bytes": int(peak * 2**20)}  # fmt: skip
        if name == "torch_fsdp":
            row |= {"status": "oom", "reason": "rank 1: why"}
        Results(tmp_path).record(row)
    rows = comparison(settings, 2, "NVIDIA H200")

    def bars(on_gpu):
        assert draw_predicted(settings, rows, 2, on_gpu, "subtitle", tmp_path / "memory.png")
        return found, rows

    return bars


def test_measured_peaks_are_beside_what_was_predicted(drawn):
    bars, rows = drawn(on_gpu=True)
    zero1 = bars["zero1"]
    assert zero1["measured"] == pytest.approx(1.05 * sum(zero1["kinds"].values()), abs=0.01)
    assert bars["torch_fsdp"]["measured"] is None
    assert bars["torch_fsdp"]["reason"] == "oom: rank 1: why"
    assert "fsdp2" not in bars
    assert "Left out, since it is not predicted: fsdp2." in bars["notes"]
    told = {row["label"]: row.get("predicted") for row in rows}
    assert told["zero1"].endswith("(-4.8%)")
    assert told["torch_fsdp"] is told["fsdp2"] is None
    assert "predicted" in [column.key for column in columns(rows)]


def test_memory_of_a_process_is_no_peak_of_a_step(drawn):
    bars, _ = drawn(on_gpu=False)
    assert bars["zero1"]["measured"] is None
    assert "on a CPU the peak that is measured is the process's memory" in bars["notes"]
