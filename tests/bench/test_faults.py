"""What fails becomes a row that names rank and cause; the other implementations are measured."""

import json
import re

import pytest

from tests.support.benchmark_command import PLUGINS, benchmark, forked_benchmark, table_of

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
SILENCE = "rank 1: stopped responding, last seen at .*; rank 0 waits at Stopped .*step 2"
ROWS = {
    "Raising": "error: rank 1: KeyError: 'no bucket of that name'",
    "Killed": r"error: rank 1: killed by SIGKILL \(.*\), last seen at ",
    "Hungry": "oom: rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
    "Sleepy": r"timeout: rank 1: stalled at Sleepy \(round \d\), step 2, backward_pass: no "
    "progress for 8 s",
    "Stopped": f"error: {SILENCE}, gradient_sync",
}


def run_with(folder, *classes, timeout=8, start=benchmark, **options):
    plugins = [f"{PLUGINS}:{name}" for name in classes]
    names = ["--implementations", "none", *plugins]
    return start(*names, "--timeout", timeout, "--output-dir", folder, **options)


def causes(run) -> list[str]:
    return re.findall(r"^(?:rank \d|the run) failed.*$", run.stderr, re.MULTILINE)


def rows_of(folder) -> dict[str, dict]:
    """The last row of each implementation."""
    rows = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {row["implementation"].rpartition(":")[2]: row for row in rows}


def check(run, folder, names) -> None:
    """One row and one line each, and the right ones are measured."""
    assert run.returncode == 1
    table, rows = table_of(run.stdout), rows_of(folder)
    assert float(table["none"].split()[1]) == 0
    for name in names:
        assert re.search(rf"^{name} +{ROWS[name]}", table[name]), table[name]
        assert rows[name]["status"] == ROWS[name].partition(":")[0]
    assert len(causes(run)) == len(names)


@pytest.mark.slow
def test_wrong_ones_and_a_raising_one(tmp_path):
    """With a right one beside them: all are measured, and the exit status says it."""
    names = ["Forgetful", "Raising", "Poisonous", "Uphill", "Minimal"]
    run = run_with(tmp_path, *names, timeout=120, start=forked_benchmark)
    check(run, tmp_path, ["Raising"])
    table = table_of(run.stdout)
    assert "1.0e+00 WRONG" in table["Forgetful"]
    assert "inf WRONG" in table["Poisonous"]
    assert "WRONG" in table["Uphill"]
    assert re.search(r"Uphill: change of two rounds of [\w.]+ on rank \d in step 3", run.stdout)
    assert re.search(r"^Minimal +0.0e\+00 +\d", table["Minimal"])
    assert (tmp_path / "comparison.png").exists()
    said = rows_of(tmp_path)
    for text in (table["Raising"], run.stderr, said["Raising"]["reason"]):
        assert re.search(r"at tests/support/plugins.py:\d+ in misbehave: raise KeyError\(", text)
    for text in (run.stdout, run.stderr, said["Raising"]["traceback"]):
        assert 'plugins.py", line' in text
        assert "in _in_backward" in text
    assert "Forgetful: gradient of token_embedding.weight on rank " in run.stdout
    assert "its norm is 2 x the right one" in run.stdout
    lines = re.findall(r"^\d+ of 18, after .*: (\w+) \(.*\): \S", run.stderr, re.MULTILINE)
    assert lines.count("Minimal") == 3  # one gate, two rounds


BLAMELESS = """
import time
import torch.distributed as dist
from ddp_by_hand.bench import worker
from tests.support.plugins import Minimal as Right

if not hasattr(worker, "true"):  # the first rank takes a while to record a row
    worker.true = worker.environment
    worker.environment = lambda: (time.sleep(1), worker.true())[1]


class Minimal(Right):
    def __init__(self, module):
        if dist.get_rank() == 1:
            raise ValueError("at once")
        super().__init__(module)
"""


@pytest.mark.slow
def test_a_failure_is_not_blamed_on_the_one_before(tmp_path):
    """Rank 1 fails in the second's constructor, the first rank has yet to record the first's."""
    (tmp_path / "other.py").write_text(BLAMELESS)
    names = ["--implementations", "none", f"{PLUGINS}:Minimal", f"{tmp_path}/other.py:Minimal"]
    run = forked_benchmark(*names, "--rounds", 1, "--output-dir", tmp_path / "o")
    assert run.returncode == 1
    table = table_of(run.stdout)
    assert re.search(r"^plugins.Minimal +0.0e\+00 +\d", table["plugins.Minimal"])
    where = r"other.py:\d+ in __init__: raise ValueError\(\"at once\"\)"
    found = re.search(rf"error: rank 1: ValueError: at once, at .*{where}", table["other.Minimal"])
    assert found, table


@pytest.mark.slow
def test_out_of_memory_a_sleep_a_stop_and_a_kill(tmp_path):
    names = ["Hungry", "Sleepy", "Stopped", "Killed"]
    check(run_with(tmp_path, *names, "Minimal"), tmp_path, names)


@pytest.mark.slow
def test_a_failed_cell_is_tried_again_by_a_rerun(tmp_path):
    for attempt in (1, 2):
        check(run_with(tmp_path, "Raising", timeout=120), tmp_path, ["Raising"])
        lines = (tmp_path / "results.jsonl").read_text().splitlines()
        assert sum('"error"' in line for line in lines) == attempt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Raising", "Hungry", "Sleepy", "Stopped"])
def test_under_torchrun_the_cause_is_named_once_and_recorded(tmp_path, name):
    run = run_with(tmp_path, name, launcher=TORCHRUN)
    assert run.returncode == 1
    assert len(causes(run)) == 1
    assert re.search(ROWS[name].partition(": rank 1: ")[2], causes(run)[0])
    assert rows_of(tmp_path)[name]["status"] == ROWS[name].partition(":")[0]
