"""The table of predicted memory that --dry-run prints."""

import re

import pytest

from tests.support.benchmark_command import benchmark


def test_dry_run_prints_each_kind_and_the_peak():
    run = benchmark("--dry-run", "--implementations", "none", "torch_ddp")
    assert run.returncode == 0, run.stderr
    title, _, table = run.stdout.partition("predicted memory")[2].partition("\n")
    assert title == " at the peak of a step on 2 ranks, MiB per rank"
    cells = {
        line.split()[0]: line.split()[1:] for line in table.splitlines() if len(line.split()) > 5
    }
    assert cells["implementation"][0] == "parameters"
    *kinds, peak = map(float, cells["none"])
    parameters = int(re.search(r"model: ([\d,]+) parameters", run.stdout)[1].replace(",", ""))
    mebibytes = 4 * parameters / 2**20
    assert kinds[0] == pytest.approx(mebibytes, abs=0.05)
    assert kinds[2] == pytest.approx(2 * mebibytes, abs=0.05)
    assert sum(kinds) == pytest.approx(peak, abs=0.3)
    assert float(cells["torch_ddp"][4]) == kinds[2]  # buckets, twice while they are rebuilt


def test_private_runs_have_no_table():
    run = benchmark("--dry-run", "--implementations", "none", "--clipping", "bookkeeping")
    assert "predicted memory" not in run.stdout
