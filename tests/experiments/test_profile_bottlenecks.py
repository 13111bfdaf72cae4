"""`experiments.profile_bottlenecks`: runs made slow on purpose get the right verdict."""

import copy
import json
import os
import time
from unittest.mock import patch

import pytest
from matplotlib.text import Text

from ddp_by_hand.experiments.llama_fsdp.results import GridCell, GridSettings, recorded
from ddp_by_hand.experiments.profile_bottlenecks import plot
from ddp_by_hand.experiments.profile_bottlenecks.__main__ import main, run_of, summarize, sweep
from ddp_by_hand.experiments.profile_bottlenecks.cell import measure, split
from ddp_by_hand.experiments.profile_bottlenecks.options import Options
from ddp_by_hand.experiments.profile_bottlenecks.verdict import (
    PHASES,
    bounds,
    fixed_memory,
    growths,
    headline,
    overhead,
    profiled_ms,
)
from ddp_by_hand.lm.launch import Outcome
from ddp_by_hand.lm.rank_pool import Context
from ddp_by_hand.lm.runtime import Hardware
from ddp_by_hand.lm.watch import Cause
from ddp_by_hand.measure import Results
from ddp_by_hand.measure.growth import fit_growth
from ddp_by_hand.measure.options import parse_options
from dp_clipping.distributed import gradient_reduce as sharded_sums
from dp_clipping.profiling.profile import SWITCH
from tests.support.alone import Watching, worker_of
from tests.support.drawn import check_texts
from tests.support.page import Page

CPU = Hardware("gloo", "cpu", 2, "gloo, 2 processes")
SETTINGS = GridSettings(
    "tiny", 2, 2, 1, 1e-5, 1.0, 1.0, "flat", False, 0, 60.0, enable_profiling=True
)  # fmt: skip
SLEEP_S, UNITS = 0.1, 3  # of a collective on purpose; FSDP modules of the tiny shape


def row_of(context: Context, mode: str, length: int, settings: GridSettings) -> dict:
    """What one rank measures; the switch is left as it was."""
    worker = worker_of(context)
    try:
        return measure(GridCell(mode, length), settings, CPU, worker, Watching())
    finally:
        os.environ.pop(SWITCH, None)


def measure_with(context: Context, sleep_s: float) -> dict:
    """Collectives take as long as what is between them, or longer, however busy the machine is."""
    real, ended = sharded_sums.reduce_scatter_together, [time.monotonic()]

    def slow(*arguments):
        time.sleep(max(sleep_s, min(time.monotonic() - ended[0], 20 * sleep_s)))
        found, ended[0] = real(*arguments), time.monotonic()
        return found

    with patch.object(sharded_sums, "reduce_scatter_together", slow):
        return row_of(context, "bookkeeping_fsdp", 16, SETTINGS)


@pytest.fixture(scope="module")
def slow_row(cpu_ranks):
    """Of ranks whose reduce-scatter sleeps."""
    return cpu_ranks.run(4, measure_with, SLEEP_S)[0]


def test_a_slow_collective_and_phases_that_are_the_whole_step(slow_row):
    found = bounds([slow_row])
    assert found[0].name == "communication"
    slept = 1e3 * SLEEP_S * UNITS
    assert found[0].ms > slept
    assert found[0].gain_ms == pytest.approx(found[0].ms / 2)
    assert "--batch-size 4" in found[0].change
    assert slow_row["phases_ms"]["collectives"] > slept
    assert [b.ms for b in found] == sorted((b.ms for b in found), reverse=True)
    assert headline([slow_row]).startswith("16 tokens are bound by communication")
    assert list(slow_row["phases_ms"]) == [n for n in PHASES if n in slow_row["phases_ms"]]
    assert "second backward" not in slow_row["phases_ms"]  # bookkeeping has none
    assert len(slow_row["layer_norm_ms"]) > 10
    assert sum(slow_row["layer_norm_ms"].values()) > 0
    assert slow_row["trace"]["basis"].startswith("CPU")
    assert 0.2 < overhead(slow_row) < 5
    assert slow_row["profile"]["norms"][0]["after"]["shape"] == [1, 2]


def test_split_is_complete_and_takes_nothing_twice():
    own = {
        "norm_pass": 5.0, "norm/dense/a": 2.0, "clip_coefficients": 1.0, "weighted_sum": 0.5,
        "second_backward": 4.0, "sum/a": 1.5, "hand_over": 0.25, "noise": 3.0,
    }  # fmt: skip
    ranges = {name: {"own_ms": ms} for name, ms in own.items()}
    parts = split([10.0, 14.25, 0.75, 7.0], ranges)
    assert sum(parts.values()) == pytest.approx(32.0)
    assert parts["first backward"] == pytest.approx(14.25 + 0.75 - 9.25)
    assert parts["optimizer"] == pytest.approx(4.0)
    del ranges["second_backward"], ranges["hand_over"]
    assert not {"second backward", "collectives"} & split([10.0, 14.0, 0.0, 7.0], ranges).keys()


def test_shares_are_of_the_profiled_step(slow_row):
    """Steps without the switch may take less than the phases of those with it."""
    row = slow_row | {"median_time_ms": profiled_ms(slow_row) / 3}
    found = bounds([row])
    assert found[0].share == pytest.approx(found[0].ms / sum(row["phases_ms"].values()))
    assert 0.9 < sum(bound.share for bound in found) < 1 + 1e-9
    quick = on_gpu(slow_row, computation=60.0) | {"median_time_ms": 30.0}
    assert sum(bound.share for bound in bounds([quick])) == pytest.approx(1, abs=0.05)


def test_near_its_memory_limit(slow_row):
    peak = slow_row["peak_memory_mb"]
    assert bounds([slow_row], 2 * peak)[0].name == "communication"
    first = bounds([slow_row], 1.05 * peak)[0]
    assert (first.name, first.ms) == ("memory", None)
    assert first.share == pytest.approx(1 / 1.05)
    assert "--batch-size 1" in first.change
    alone = slow_row | {"batch_size": 1}
    assert "leave out --bookkeeping" in bounds([alone], peak)[0].change
    assert "--num-processes" in bounds([alone | {"mode": "ghost_fsdp"}], peak)[0].change


def test_out_of_memory_is_a_row_and_a_verdict(slow_row):
    failed = {**failure(slow_row), "seq_length": 64}
    first = bounds([slow_row, failed])[0]
    assert first.name == "memory"
    assert "out of memory at 64" in first.evidence
    text = summarize([slow_row, failed], None)
    assert "oom: no memory" in text
    with pytest.raises(ValueError, match="no length"):
        bounds([failed])
    assert "No length could be measured" in summarize([failed], None)


def failure(row: dict) -> dict:
    kept = ("seq_length", "mode", "batch_size", "num_processes", "num_gpus", "config",
            "environment", "device_type", "peak_memory_mb")  # fmt: skip
    return {name: row[name] for name in kept} | {
        "status": "oom", "reason": "no memory", "median_time_ms": None, "peak_memory_mb": None,
        "rounds": [{"round": 0, "status": "oom", "reason": "no memory"}],
    }  # fmt: skip


def test_peak_at_half_the_batch_follows_from_the_line_through_the_peaks(slow_row):
    rows = [slow_row | {"seq_length": n, "peak_memory_mb": 100.0 + n} for n in (100, 200, 400)]
    assert fixed_memory(rows) == pytest.approx(100)
    assert "predicted peak 300 MiB" in bounds(rows, 510.0)[0].how
    assert fixed_memory(rows[:1]) is None


def test_forced_norm_algorithm_is_to_be_given_up(slow_row):
    """The fast sibling of the next."""
    row = on_gpu(slow_row, computation=160.0)
    row |= {"mode": "flash_fsdp", "plan_seconds": {"planned": 4.0, "auto": 1.0}}
    row["phases_ms"]["norms"] = 80.0
    assert bounds([row])[0].change == "nothing cheaper is known for these shapes"
    row["config"]["norm_algorithm"] = "width"
    first = bounds([row])[0]
    assert first.change == "--norm-algorithm auto"
    assert first.gain_ms == pytest.approx(0.75 * (80.0 + 9.0))


@pytest.mark.slow
def test_norm_algorithm_forced_to_the_wrong_extreme(tmp_path, monkeypatch):
    """Gram matrices of many tokens, in layers so narrow that accumulating would be cheaper: the
    whole command, its kernels interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    arguments = ["--use-flash", "--bookkeeping", "--norm-algorithm", "width", "--cpu"]
    arguments += ["--seq-lengths", "160", "--num-processes", "1", "--batch-size", "1"]
    arguments += ["--num-iter", "1", "--warmup-iter", "1", "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    (row,) = Results(tmp_path).rows()
    first = json.loads((tmp_path / "verdict.json").read_text())["bounds"][0]
    assert (first["name"], first["change"]) == ("norm kernels", "--norm-algorithm auto")
    assert 0 < first["gain_ms"] < first["ms"] + row["phases_ms"]["sums"]
    assert "+" in max(row["layer_norm_ms"], key=row["layer_norm_ms"].get)  # one launch for several
    assert "collectives" not in row["phases_ms"]  # one process


def on_gpu(row: dict, **trace: float) -> dict:
    """As if measured on one GPU, 100 ms per step."""
    phases = {
        "forward": 20.0, "first backward": 30.0, "norms": 20.0, "coefficients": 1.0, "sums": 9.0,
        "noise": 10.0, "optimizer": 10.0,
    }  # fmt: skip
    return copy.deepcopy(row) | {
        "device_type": "cuda", "num_processes": 1, "median_time_ms": 100.0, "phases_ms": phases,
        "layer_norm_ms": {"a+b": 12.0, "c": 8.0}, "device_memory_mb": 1e9,
        "trace": {"computation": 0.0, "exposed": 0.0} | trace,
    }  # fmt: skip


def test_a_gpu_that_waits_for_launches_and_not_for_the_profiler(slow_row):
    row = on_gpu(slow_row, computation=40.0)
    first, second = bounds([row])[:2]
    assert (first.name, first.ms) == ("host", 60.0)
    assert first.gain_ms == 30.0
    assert "--use-flash" in first.change
    assert second.ms == pytest.approx(0.4 * 69)  # the model's share of the time it worked
    busy = on_gpu(slow_row, computation=99.0)
    assert bounds([busy])[0].name == "model"
    assert "bound by the model (68% of the step)" in headline([busy])
    # a step of 62 ms with 60 of kernels idles for 2, though one with the switch took 100
    row = on_gpu(slow_row, computation=60.0) | {"median_time_ms": 62.0}
    host = next(bound for bound in bounds([row]) if bound.name == "host")
    assert host.ms == pytest.approx(2.0)
    assert host.gain_ms == pytest.approx(1.0)
    assert sum(bound.share for bound in bounds([row])) == pytest.approx(1, abs=0.05)


def test_a_gpu_whose_transfers_are_exposed_or_whose_norms_are_plain(slow_row):
    row = on_gpu(slow_row, computation=50.0, exposed=45.0) | {"num_processes": 4}
    row["phases_ms"] |= {"forward": 50.0, "first backward": 10.0, "collectives": 5.0}
    first = bounds([row])[0]
    assert (first.name, first.ms) == ("communication", 45.0)
    row["profile"]["ranges"]["norm_all_reduce"] = {"own_ms": 40.0}
    assert "layerwise" in bounds([row])[0].change
    row = on_gpu(slow_row, computation=160.0)
    row["phases_ms"]["norms"] = 80.0
    first = bounds([row])[0]
    assert first.change == "--use-flash"
    assert first.gain_ms == pytest.approx(81.0 - 20.0)
    assert first.gain == "; predicted gain 61.0 ms per step"
    assert "a and 1 more in one launch" in first.evidence


def test_exponent_of_a_power():
    lengths = [64, 128, 256, 512]
    found = fit_growth(lengths, [3 * n**1.7 for n in lengths])
    assert (found.exponent, found.factor) == (pytest.approx(1.7), pytest.approx(3))
    assert found.low == pytest.approx(1.7) == found.high
    assert found.at(1024) == pytest.approx(3 * 1024**1.7)
    two = fit_growth(lengths[:2], [1.0, 2.0])
    assert (two.exponent, two.low) == (pytest.approx(1), None)
    assert str(two) == "T^1.00"
    assert fit_growth([64], [1.0]) is None
    assert fit_growth(lengths, [1.0, 0.0, 1.0, 1.0]) is None


def grown(row: dict, lengths=(16, 32, 64)) -> list[dict]:
    """The row at several lengths, times proportional to the length."""
    rows = []
    for n in lengths:
        phases = {name: ms * n / 16 for name, ms in row["phases_ms"].items()}
        one = {"seq_length": n, "phases_ms": phases, "peak_memory_mb": 500.0 + n}
        rows.append(row | one | {"median_time_ms": row["median_time_ms"] * n / 16})
    return rows


def test_every_phase_is_fitted_and_written(slow_row):
    rows = grown(slow_row)
    found = growths(rows)
    assert found.keys() == {"total", "memory", *slow_row["phases_ms"]}
    assert all(g.exponent == pytest.approx(1) for n, g in found.items() if n != "memory")
    text = summarize(rows, None)
    norms = next(line for line in text.splitlines() if line.startswith("norms "))
    assert "T^1.00" in norms
    assert "  total: T^1.00" in text
    assert "Verdict: 64 tokens are bound by communication" in text
    gain = bounds(rows)[0].gain_ms / rows[0]["batch_size"]
    assert (
        f"Change: --batch-size 4 (what is sent does not grow with the batch); predicted gain "
        f"{gain:.1f} ms per sample." in text
    )  # the step gets longer
    assert "The profiling switch cost" in text
    cold = [row | {"config": row["config"] | {"warmup_iter": 0}} for row in rows]
    assert "not measurable without warm-up" in summarize(cold, None)
    assert "Slowest norms at 64 tokens" in text


@pytest.mark.parametrize(
    "changed", [{}, {"mode": "flash_fsdp", "ran_as": "ghost_fsdp", "peak_memory_mb": 530.0}]
)
def test_texts_of_the_picture_do_not_overlap(slow_row, changed):
    rows = [row | changed for row in grown(slow_row)]
    rows.append(failure(slow_row) | {"seq_length": 128})
    figure = plot.figure_of(rows, 600.0)
    check_texts(figure, figure.findobj(Text), apart=True)


def fake_start(row: dict, oom_at: int):
    """Starts nothing: leaves the row as a cell would, or fails."""

    def start(command: list[str]) -> Outcome:
        length = int(command[command.index("--length") + 1])
        if length == oom_at:
            return Outcome(1, Cause(0, "oom", "out of memory"))
        output = command[command.index("--output") + 1]
        with open(output, "w") as file:
            json.dump(row | {"seq_length": length}, file)
        return Outcome(0, None)

    return start


def test_sweep_isolates_what_runs_out_of_memory_and_resumes(slow_row, tmp_path, capsys):
    lengths = ["--seq-lengths", "16", "32", "64", "--model-name", "tiny"]
    options = parse_options(Options, ["--cpu", *lengths, "--output-dir", str(tmp_path)])
    row = {k: v for k, v in slow_row.items() if k != "key"}
    assert sweep(run_of(options, CPU), fake_start(row, oom_at=32)) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [r["status"] for r in rows] == ["ok", "oom", "ok"]
    assert (tmp_path / "bottlenecks.png").exists()
    assert json.loads((tmp_path / "verdict.json").read_text())["bounds"][0]["name"] == "memory"
    check_report((tmp_path / "report.html").read_text(), row)
    started = []
    again = fake_start(row, oom_at=0)
    assert sweep(run_of(options, CPU), lambda c: started.append(c) or again(c)) == 0
    assert len(started) == 1  # only the length that had failed
    first, second = capsys.readouterr().out.split("results.jsonl\n")[:2]
    assert "[2/3] 32 tokens: oom" in first
    assert "finished in" not in first
    assert f"\n2 of 3 cells are finished in {tmp_path}\n[1/1] 32 tokens: " in second
    assert "] 64 tokens" not in second


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--num-iter", "4"], "num_iter 3, not 4"),
        (["--bookkeeping"], "mode ghost, not bookkeeping"),
        (["--num-processes", "1"], "num_processes 2, not 1"),
    ],
)
def test_a_folder_of_other_settings_is_refused(slow_row, tmp_path, capsys, changed, said):
    common = ["--cpu", "--num-processes", "2", "--seq-lengths", "16", "--output-dir", str(tmp_path)]
    options = parse_options(Options, [*common, "--num-iter", "3", "--model-name", "tiny"])
    run = run_of(options, CPU)
    config = recorded(run.settings) | {"vocab_size": 8}
    row = slow_row | {"mode": options.mode, "batch_size": 4, "num_processes": 2}
    row = {k: v for k, v in row.items() if k != "key"} | {"config": config}
    Results(tmp_path).record(row)
    run.check(run.differs)
    assert main([*common, "--num-iter", "3", *changed]) == 2
    assert capsys.readouterr().err == (
        f"ddp_by_hand.experiments.profile_bottlenecks: --output-dir {tmp_path} holds results of "
        f"{said}; name another folder\n"
    )


def check_report(text: str, row: dict) -> None:
    """Phases as they were measured, and nothing about options that there are not."""
    page = Page(text)
    phases = page.rows("Phases")
    assert list(phases) == [*row["phases_ms"], "sum of phases"]
    whole = sum(row["phases_ms"].values())
    for name, ms in row["phases_ms"].items():
        assert float(phases[name]["64 tokens, ms"]) == pytest.approx(ms, abs=0.051)
        assert float(phases[name]["share at 64"][:-1]) == pytest.approx(100 * ms / whole, abs=0.051)
        assert phases[name]["grows as [95 %]"] == "T^0.00"  # made up: both lengths are alike
    assert "--rounds" not in page.text
    assert "×: ratio" not in page.text  # there is nothing beside which
    glance = page.text[page.text.index("At a glance\n") :]
    assert glance.index("64 tokens are bound by memory") < glance.index("3 cells: ")
    assert any("oom" in row.values() for row in page.rows("Not measured").values())
