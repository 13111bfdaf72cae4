"""Profile mode on two gloo ranks: traces with named ranges, summaries, pictures."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_by_hand.bench.messages import describe_messages
from ddp_by_hand.lm.exchange import plan
from ddp_by_hand.lm.shape import Shape
from ddp_by_hand.tracing import load_trace
from ddp_by_hand.tracing.intervals import difference, total
from tests.support.benchmark_command import PLUGINS, benchmark, forked_benchmark

NAMES = ["none", "ddp"]
ALWAYS = ["forward_pass", "backward_pass", "gradient_sync", "optimizer_step", "lr_scheduling"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def run(place):
    """Into the default folder, beside one that needs GPUs."""
    names = ["--implementations", "none", "ddp_copy_engine", "ddp"]
    mode = ["--profile", "--profile-implementation", "all", "--dtype", "bfloat16"]
    return forked_benchmark(*mode, *names, "--num-layers", 1, cwd=place)


@pytest.fixture(scope="module")
def folder(run, place):
    assert run.returncode == 0, run.stderr
    return place / "profiler_output"


def ranges(folder, name: str, rank: int) -> dict[str, list[tuple[float, float]]]:
    """Label -> (start, end) of the ranges in a trace, in microseconds."""
    trace = json.loads((folder / f"{name}_rank_{rank}_trace.json").read_text())
    found = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_each_has_files_and_a_summary_that_explains_itself(folder):
    expected = {"all_timeline.png", "budget.png"}
    for name in NAMES:
        expected |= {f"{name}_rank_{rank}_trace.json" for rank in range(2)}
        expected |= {f"{name}_summary.txt", f"{name}_timeline.png"}
    assert {path.name for path in folder.iterdir()} == expected
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    for name in NAMES:
        text = (folder / f"{name}_summary.txt").read_text()
        for word in ("Configuration", "bfloat16", "computation", "communication", "overlapped",
                     "exposed", "idle", "CPU operators", "forward_pass", "Slowest operators",
                     "aten::", f"{name}_rank_1_trace.json", "perfetto"):  # fmt: skip
            assert word in text, word


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trace_has_every_phase_of_every_step(folder, name, rank):
    found = ranges(folder, name, rank)
    for label in ALWAYS:
        assert len(found[label]) == 4, label  # two epochs of two steps


def test_what_pytorch_writes_follows_the_rules(folder):
    """All communication is known, and is all in its phase: nothing of it is hidden."""
    for rank in range(2):
        trace = load_trace(folder / f"ddp_rank_{rank}_trace.json")
        assert (trace.rank, len(trace.communication)) == (rank, 12 * 4)
        assert total(difference(trace.communication, trace.phases["gradient_sync"])) == 0


@pytest.mark.parametrize("name", NAMES)
def test_epochs_tell_kind_and_learning_rate_and_only_warmup_is_clipped(folder, name):
    found = ranges(folder, name, 0)
    epochs = sorted(label for label in found if label.startswith("epoch_"))
    assert epochs == ["epoch_0_warmup_lr_0_to_0.0005", "epoch_1_training_lr_0.001"]
    (warmup,), (training,) = found[epochs[0]], found[epochs[1]]
    clips = found["gradient_clipping_warmup"]
    assert len(clips) == 2
    assert all(warmup[0] <= start and end <= warmup[1] for start, end in clips)
    steps = found["optimizer_step"]
    assert sum(training[0] <= start and end <= training[1] for start, end in steps) == 2


def test_without_a_terminal_it_prints_a_line_each(run):
    lines = [line for line in run.stdout.splitlines() if "The machine was busy" not in line]
    assert lines[0] == "gloo, 2 processes on CPU (as asked)"
    for number, name in enumerate(NAMES, start=1):
        assert lines[number].startswith(f"{name}: step ")
        assert "exposed" in lines[number]
        assert "waiting" in lines[number]
    assert "ddp_copy_engine" in lines[3]
    assert "unavailable: ddp_copy_engine needs" in lines[3]
    assert lines[-1] == "traces, summaries and timelines: profiler_output"
    assert "[1/" not in run.stderr


def test_the_budget_is_printed_and_in_the_summaries(run, folder):
    """The table has all variants; each summary has its own row and the floor's."""
    table = run.stdout.partition("Budget of a step, ms")[2].splitlines()
    assert table[1].split()[:3] == ["step", "computation", "contention"]
    assert [line.split()[0] for line in table[3:5]] == NAMES
    assert "Basis: CPU operators (a proxy)" in run.stdout
    assert f"picture of the budgets: {Path('profiler_output') / 'budget.png'}" in run.stdout
    for name in NAMES[1:]:
        section = (folder / f"{name}_summary.txt").read_text().partition("Budget of a step, ms")[2]
        row = next(line for line in section.splitlines() if line.startswith(name)).split()
        assert float(row[1]) == pytest.approx(sum(map(float, row[2:-1])), abs=0.01)
    assert "Budget of a step" not in (folder / "none_summary.txt").read_text()


@pytest.mark.slow
def test_one_implementation_alone(tmp_path):
    run = benchmark("--profile", "--profile-implementation", "ddp_individual_v2",
                    "--profile-output-dir", tmp_path / "a" / "b", "--warmup-epochs", 0)  # fmt: skip
    assert run.returncode == 0, run.stderr
    files = {path.name for path in (tmp_path / "a" / "b").iterdir()}
    assert files == {
        "ddp_individual_v2_rank_0_trace.json",
        "ddp_individual_v2_rank_1_trace.json",
        "ddp_individual_v2_summary.txt",
        "ddp_individual_v2_timeline.png",
    }
    found = ranges(tmp_path / "a" / "b", "ddp_individual_v2", 1)
    assert "gradient_clipping_warmup" not in found
    assert {label for label in found if label.startswith("epoch_")} == {
        "epoch_0_training_lr_0.001",
        "epoch_1_training_lr_0.001",
    }


@pytest.mark.slow
def test_a_failure_is_named_and_the_others_are_profiled(tmp_path):
    names = ["ddp", "ddp_copy_engine", f"{PLUGINS}:Raising", "ddp_individual", f"{PLUGINS}:Killed"]
    run = benchmark("--profile", "--implementations", *names, "--profile-output-dir", tmp_path)
    assert run.returncode == 1
    assert run.stderr.count("rank 1 failed first: KeyError: 'no bucket of that name'") == 1
    lines = [line for line in run.stdout.splitlines() if "The machine was busy" not in line]
    assert [line.partition(":")[0] for line in lines[1:3]] == ["ddp", "ddp_individual"]
    assert lines[3].startswith("ddp_copy_engine: unavailable: ")
    assert lines[4].startswith("Raising: error: rank 1: KeyError: 'no bucket of that name'")
    assert lines[5].startswith("Killed: error: rank 1: killed by SIGKILL")
    assert lines[6] == f"picture of all: {tmp_path / 'all_timeline.png'}"
    for name in ("ddp", "ddp_individual"):
        assert (tmp_path / f"{name}_summary.txt").exists()


def test_messages_cost_for_the_call_and_for_their_bytes():
    """Two ranks, of which one is late at each all-reduce: 0.5 ms a call and 2 ms a MiB."""
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    configuration = {
        "model": {**sizes, "vocab_size": 256, "context_length": 16},
        "batch_size": 2,
        "dtype": "float32",
        "bucket_size_mb": None,
    }
    sent = plan("ddp", Shape.of(configuration)).nbytes
    early, late, now = [], [], 0.0
    for nbytes in 2 * sent:  # two steps
        end = now + 100 + 500 + 2000 * nbytes / 2**20
        early.append((now, end))
        late.append((now + 100, end))
        now = end
    traces = [
        SimpleNamespace(collectives={"all_reduce": calls}, configuration=configuration)
        for calls in (early, late)
    ]
    _, alone, bucketed = describe_messages(traces)
    mib = sum(sent) / 2**20
    ms = len(sent) * 0.5 + mib * 2
    assert alone == f"  ddp           21 × 0.5 ms + {mib:.3g} MiB × 2 ms/MiB = {ms:.3g} ms"
    assert bucketed.startswith("  ddp_bucketed   1 × 0.5 ms + ")
    for calls in (early, late):
        calls.append((now, now + 1))  # not an all-reduce of a gradient
    assert describe_messages(traces) == []
