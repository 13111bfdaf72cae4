"""One tiny real run on two gloo ranks: what it prints, what it leaves, and what a rerun does."""

import json
import os
import platform
import pty
import re
import shlex
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddp import IMPLEMENTATIONS
from ddp_by_hand.bench.settings import settings_from
from ddp_by_hand.bench.worker import Benchmark
from ddp_by_hand.measure import SCHEMA_VERSION
from ddp_by_hand.measure.report_tables import milliseconds
from tests.support.benchmark_command import (
    LIMIT_S,
    PLUGINS,
    PROGRESS,
    benchmark,
    finish,
    forked_benchmark,
    launch,
    launch_forked,
    parse,
    table_of,
    wait_for_rows,
)
from tests.support.page import Page

ALIKE = {  # other ones in what is measured; slow tests have all
    "ddp_individual_v2", "zero2", "torch_ddp_tuned", "torch_zero1", "torch_fsdp",
}  # fmt: skip
BUILT_IN = [name for name in IMPLEMENTATIONS if name not in ALIKE]
NAMES = [*BUILT_IN, "Minimal"]
MEASURED = [name for name in NAMES if name != "ddp_copy_engine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "new" / "results"


@pytest.fixture(scope="module")
def arguments(folder):
    names = [*BUILT_IN, f"{PLUGINS}:Minimal"]
    return ["--output-dir", folder, "--implementations", *names]


@pytest.fixture(scope="module")
def interrupted(arguments, folder):
    """The same run at a terminal, which reaches the whole process group with Ctrl-C."""
    terminal, end = pty.openpty()
    process = launch_forked(*arguments, terminal=os.ttyname(end))
    wait_for_rows(folder, len(NAMES) + 1)
    os.killpg(process.pid, signal.SIGINT)
    run = process.finish(LIMIT_S)
    os.close(end)
    run.shown = os.read(terminal, 1 << 16).decode()
    run.rows = (folder / "results.jsonl").read_text()
    return run


@pytest.fixture(scope="module")
def finished(interrupted, arguments):
    """Resumed, without a terminal."""
    return forked_benchmark(*arguments)


@pytest.fixture(scope="module")
def rows(finished, folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_it_says_where_it_runs_and_one_line_a_cell(finished):
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("gloo, 2 processes on CPU (as asked)\n2 ranks on cpu, ")
    lines = finished.stderr.splitlines()  # without a terminal
    assert lines
    assert all(PROGRESS.match(line) for line in lines), lines


def test_cells_of_what_is_unavailable_have_a_line_too(capsys, monkeypatch, tmp_path):
    settings = settings_from(parse(["--implementations", "none", "ddp"]), "cpu", tmp_path)
    worker = SimpleNamespace(is_first=True, world_size=2, device=torch.device("cpu"))
    run = Benchmark(settings, worker)
    missing = {"status": "unavailable", "reason": "needs two GPUs"}
    monkeypatch.setattr(run, "_agree_on", lambda cells: cells)
    monkeypatch.setattr(run, "_measure", lambda cell: missing)
    run.run()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"{n} of 12" for n in range(1, 13)]
    assert lines[-1].endswith("(round 4): unavailable")


def test_the_table_has_a_row_of_each_in_order_with_ratios(finished):
    table = table_of(finished.stdout)
    assert list(table) == NAMES
    for name in MEASURED:
        error, step, *_ = table[name].split()[1:]
        assert float(error) <= 1e-6
        assert float(step) > 0
    assert "unavailable: " in table["ddp_copy_engine"]
    assert "needs NVIDIA GPUs" in table["ddp_copy_engine"]
    heading = next(line for line in finished.stdout.splitlines() if line.startswith("implem"))
    assert len(heading) <= 132
    legend = finished.stdout.partition("\n\nerror  ")[2]
    for word in ("step", "exposed", "×", "[95 %]", "calls", "sent", "peak"):
        assert word in heading
        assert word in legend
    table = table_of(finished.stdout)
    ratio = r"\d+\.\d{3}"
    interval = rf"{ratio} \[{ratio}, {ratio}\]"
    assert re.search(rf" –  +–  +{interval} +0 ", table["none"])
    assert re.search(rf" {ratio}  +– +\d+ +0.1 ", table["torch_ddp"])
    for name in set(MEASURED) - {"none", "torch_ddp"}:
        assert re.search(rf" {ratio}  +{interval} ", table[name]), table[name]


def test_rows_carry_config_environment_samples_and_status(rows):
    assert len({row["key"] for row in rows}) == len(rows) == 3 * len(MEASURED) + 1
    for row in rows:
        assert row["schema_version"] == SCHEMA_VERSION
        assert row["config"]["model"]["d_model"] == 16
        assert (row["config"]["world_size"], row["config"]["device"]) == (2, "cpu")
        assert {"python", "torch", "cpu", "git_commit", "command"} <= set(row["environment"])
        assert row["status"] == ("unavailable" if "copy" in row["implementation"] else "ok")
        if row["kind"] == "timing":
            assert len(row["step_ms"]) == 1
            assert len(row["untimed_step_ms"]) == 3
            assert min(row["step_ms"] + row["untimed_step_ms"]) > 0
            assert row["peak_memory_bytes"] > 1e7
            assert 0 < row["loss"] < 7
        elif row["status"] == "ok":
            assert row["gradient_error"] <= 1e-6 < row["tolerance"]


def test_rounds_are_interleaved_and_counts_tell_apart_what_learns_the_same(rows):
    timed = {row["implementation"]: row for row in rows if row["kind"] == "timing"}
    assert timed["none"]["collectives"] == timed["none"]["bytes"] == 0
    assert timed["ddp"]["collectives"] == timed["ddp_individual"]["collectives"] == 21
    assert timed["ddp_bucketed"]["collectives"] < 21
    apart = ("none", "zero1", "fsdp")
    others = [name for name in MEASURED if "Min" not in name and name not in apart]
    assert {timed[name]["bytes"] for name in others} == {53_568}  # every parameter, in float32
    assert 2 * 53_568 <= timed["zero1"]["bytes"] < 2.01 * 53_568  # reduced, gathered, padded
    assert 2 * 53_568 < timed["fsdp"]["bytes"] < 3 * 53_568  # gathered twice, but for the root
    losses = {
        row["implementation"]: row["loss"]
        for row in rows
        if row["kind"] == "timing"
        and row["round"] == 0
        and row["implementation"] not in ("none", "diloco")
    }
    assert max(losses.values()) - min(losses.values()) < 1e-4
    order = [(row["round"], row["implementation"]) for row in rows if row["kind"] == "timing"]
    assert {number for number, _ in order[: len(MEASURED)]} == {order[0][0]}


def test_the_picture_is_there_and_nothing_half_written(finished, folder):
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    names = ["comparison.png", "memory.png", "report.html", "results.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_the_report_has_the_numbers_of_the_rows_and_of_the_table(finished, folder, rows):
    page = Page((folder / "report.html").read_text())
    assert finished.stdout.endswith(f"report: {folder / 'report.html'}\n")
    times, printed = page.rows("Step time"), table_of(finished.stdout)
    assert [name.rpartition(":")[2] for name in times] == NAMES
    for label, cells in times.items():
        name = label.rpartition(":")[2]
        if name not in MEASURED:
            assert cells["median ms"].startswith("unavailable: ")
            continue
        own = [r for r in rows if r["implementation"] == label and r["kind"] == "timing"]
        steps = [ms for row in own for ms in row["step_ms"]]
        assert cells["median ms"] == milliseconds(float(np.median(steps)))
        assert cells["rounds"] == "2 of 2"
        assert cells["× torch_ddp [95 %]"] in printed[name]
        assert f" {cells['tokens/s']} " in printed[name]
    assert len(page.pictures) == 2
    assert "orange" in page.captions[0]
    assert dict(page.tables["Environment"][0])["python"] == platform.python_version()
    assert rows[0]["command"][0] == "python"
    assert shlex.join(rows[0]["command"]) in page.text


def test_on_a_terminal_progress_is_a_line_and_ctrl_c_is_answered_by_another(interrupted, folder):
    steps = re.findall(r"\[(\d+)/(\d+)\] (\w+) \((gate|round \d)\)", interrupted.shown)
    assert [int(step[0]) for step in steps] == list(range(1, len(steps) + 1))
    assert {step[1] for step in steps} == {str(3 * len(NAMES))}
    assert [step[2] for step in steps][: len(NAMES)] == NAMES
    assert interrupted.returncode == 130
    assert interrupted.shown.count("\n") == 1
    said = f"interrupted: what is finished is in {folder}; resume with: python "
    assert said in interrupted.shown
    assert f"--output-dir {folder}" in interrupted.shown.partition(said)[2]


def test_a_resumed_run_measures_only_what_is_missing(interrupted, rows, folder):
    assert 10 <= interrupted.rows.count("\n") < len(rows)
    assert (folder / "results.jsonl").read_text().startswith(interrupted.rows)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_alone_ends_all(tmp_path, number):
    process = launch("--output-dir", tmp_path)
    wait_for_rows(tmp_path, 10)
    process.send_signal(number)
    run = finish(process)
    assert run.returncode == 130
    *lines, last = run.stderr.splitlines()
    assert last.startswith("interrupted: what is finished is in ")
    assert all(PROGRESS.match(line) for line in lines), run.stderr


@pytest.mark.slow
def test_the_default_folder_is_new_and_says_when(tmp_path):
    run = benchmark("--implementations", "none", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    (made,) = (tmp_path / "results_ddp").iterdir()
    assert re.fullmatch(r"\d{8}_\d{6}", made.name)
    assert (made / "comparison.png").exists()


@pytest.mark.slow
def test_compiled_blocks_are_proved_and_timed(tmp_path):
    run = benchmark("--compile", "--implementations", "none", "ddp_bucketed", "torch_ddp",
                    "--timeout", "200", "--output-dir", tmp_path)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert float(table_of(run.stdout)["ddp_bucketed"].split()[1]) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["mixed", "bfloat16"])
def test_sixteen_bit(tmp_path, dtype):
    run = benchmark("--dtype", dtype, "--output-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    assert list(table_of(run.stdout)) == list(IMPLEMENTATIONS)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    sent = {r["implementation"]: r.get("bytes") for r in rows if r["kind"] == "timing"}
    whole = 53_568 // (2 if dtype == "bfloat16" else 1)
    twice = {name: sent.pop(name) for name in ("zero1", "zero2")}  # gradients, then parameters
    assert set(twice.values()) == {2 * whole}
    assert sent.pop("fsdp") > whole
    assert sent.pop("torch_fsdp") is None  # not counted
    assert set(sent.values()) - {0} == {whole}


@pytest.mark.slow
def test_a_variant_with_an_option_is_a_row_of_its_own(tmp_path):
    names = ["ddp_bucketed", "ddp_bucketed+find_unused_parameters"]
    run = forked_benchmark("--implementations", "none", *names, "--output-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    gates = {row["implementation"]: row for row in rows if row["kind"] == "gate"}
    assert list(gates) == ["none", *names]
    assert all(row["gradient_error"] <= row["tolerance"] for row in gates.values())
    assert list(table_of(run.stdout)) == ["none", *names]
