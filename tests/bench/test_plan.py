"""Fused modes on their kernels, in Triton's interpreter: names, plan and ranges of each layer."""

import json
import re

import pytest

from tests.bench.test_profile import ranges
from tests.support.benchmark_command import forked_benchmark, table_of

MODES = ["flash_bookkeeping:width", "flash:input_length"]
LAYERS = [
    *(f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value", "output")),
    *(f"blocks.0.feed_forward.{name}.weight" for name in ("gate", "up", "down")),
    "head.weight",
]


def interpreted(*arguments):
    """One rank, one epoch: there are seconds in it as it is."""
    pytest.importorskip("triton")
    size = ["--num-layers", 1, "--num-processes", 1, "--rounds", 1]
    size += ["--num-epochs", 1, "--warmup-epochs", 0]
    line = [*size, "--data", "synthetic", "--implementations", "ddp_bucketed", "--clipping"]
    run = forked_benchmark(*line, *arguments, env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    return run


def lines_of_plan(text: str) -> dict[str, str]:
    """Layer -> its line, of the first plan in a text."""
    body = re.search(r"^layer  .*\n-+  .*\n((?:.+\n)+)", text, re.MULTILINE)[1]
    return {line.split()[0]: line for line in body.splitlines()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def run(folder):
    short = ["--steps-per-epoch", 1, "--output-dir", folder]
    return interpreted(*MODES, "--show-plan", "--memory-budget-mb", 0.02, *short)


@pytest.mark.slow
def test_each_choice_has_a_row_and_a_plan_which_the_results_carry(run, folder):
    assert [
        line.split()[1] for line in run.stdout.splitlines() if line.startswith("ddp_b")
    ] == MODES
    assert "WRONG" not in table_of(run.stdout)["ddp_bucketed"]
    assert ", memory budget 0.02 MiB" in run.stdout
    for mode, plan in zip(MODES, run.stdout.split("\nplan of ")[1:], strict=True):
        assert plan.startswith(f"ddp_bucketed:{mode}\n")
        lines = lines_of_plan(plan)
        assert list(lines) == [*LAYERS, "all"]
        algorithm = mode.rpartition(":")[2]
        assert all(f"  {algorithm}" in lines[layer] for layer in LAYERS)
        assert "two passes" in lines["all"]  # what does not fit the budget
        assert "recomputed" in lines["head.weight"]
        assert "recomputed" not in lines[LAYERS[0]]
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["clipping"] for row in rows if row["kind"] == "gate"] == MODES
    for row in rows:
        mode, _, algorithm = row["clipping"].partition(":")
        wanted = {"mode": mode, "norm_algorithm": algorithm, "tile_size": None,
                  "memory_budget_mb": 0.02}  # fmt: skip
        assert wanted.items() <= row["config"]["clipping"].items()
        assert ("plan" in row) == (row["kind"] == "timing")


@pytest.fixture(scope="module")
def profiled(folder):
    interpreted(*MODES[:1], "--tile-size", 16, "--profile", "--profile-output-dir", folder / "p")
    return folder / "p"


@pytest.mark.slow
def test_each_layer_has_its_ranges_and_the_summary_has_measured_times(profiled):
    stem = "ddp_bucketed_flash_bookkeeping_width"
    files = [f"{stem}_{rest}" for rest in ("rank_0_trace.json", "summary.txt", "timeline.png")]
    assert sorted(path.name for path in profiled.iterdir()) == files
    found = ranges(profiled, stem, 0)
    for prefix in ("norm/width/", "sum/"):  # layers may have a launch, and so a range, in common
        names = [name for name in found if name.startswith(prefix)]
        assert set(LAYERS) <= {
            one for name in names for one in name.removeprefix(prefix).split("+")
        }
        for name in names:
            for (start, end), whole in zip(found[name], found["backward_pass"], strict=True):
                assert whole[0] <= start <= end <= whole[1]
    text = (profiled / "ddp_bucketed_flash_bookkeeping_width_summary.txt").read_text()
    assert re.search(r"^clipping\.norm_algorithm +width$", text, re.M)
    assert re.search(r"^clipping\.tile_size +16$", text, re.M)
    assert "Plan of a private step, rank 0\n" in text
    lines = lines_of_plan(text)
    assert list(lines) == [*LAYERS, "all"]
    measured = {layer: float(line.split()[-1]) for layer, line in lines.items()}
    assert min(measured.values()) > 0
    assert measured.pop("all") == pytest.approx(sum(measured.values()), abs=0.01)
    operators = text.partition("Slowest operators")[2].partition("How to open")[0]
    assert "sum/" not in operators
    assert "norm/" not in operators
