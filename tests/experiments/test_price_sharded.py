"""`experiments.price_sharded`, on ranks that are there and as a command on two CPU processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_by_hand.experiments.price_sharded import parse, run_all
from ddp_by_hand.experiments.rounds import report
from ddp_by_hand.lm.rank_pool import Context
from tests.support.alone import Watching, worker_of

ROOT = Path(__file__).parents[2]
VARIANTS = ["ordinary", "flash_bookkeeping_per_layer"]
REHEARSAL = [
    "--model-name", "tiny", "--rows", "2x16", "--variants", *VARIANTS,
    "--rounds", "1", "--steps", "2", "--warm-up", "1",
]  # fmt: skip


def cells_of(context: Context) -> list[dict]:
    return run_all(parse(REHEARSAL), worker_of(context), Watching())


def check(cells: list[dict], text: str, ranks: int) -> None:
    assert sorted(c["variant"] for c in cells) == sorted(VARIANTS)
    for cell in cells:
        assert cell["config"]["ranks"] == ranks
        assert len(cell["step_ms"]) == 2
        pairs = zip(cell["without_step_ms"], cell["step_ms"], strict=True)
        assert all(0 < part < whole for part, whole in pairs)
        own = next(x for x in text.splitlines() if x.startswith(f"{cell['variant']} "))
        assert float(own.split()[2]) > 0


@pytest.mark.slow
def test_variants_are_measured_in_one_set_of_processes(cpu_ranks):
    everywhere = cpu_ranks.run(4, cells_of)
    check(everywhere[0], report(everywhere[0]), 4)
    assert all(cells == everywhere[0] for cells in everywhere)  # of the slowest rank


@pytest.mark.slow
def test_a_rehearsal(tmp_path):
    output = tmp_path / "price.json"
    command = [sys.executable, "-m", "ddp_by_hand.experiments.price_sharded", *REHEARSAL]
    command += ["--output", str(output), "--num-processes", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    check(json.loads(output.read_text())["cells"], run.stdout, 2)
