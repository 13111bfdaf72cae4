"""Implementations that shard the model: in the same table, gate, traces and pictures."""

from itertools import pairwise

import pytest

from ddp_by_hand.bench import main as command
from ddp_by_hand.bench.report import report
from ddp_by_hand.bench.settings import settings_from
from ddp_by_hand.bench.sharded import layout_of
from ddp_by_hand.bench.worker import GATE, plan
from ddp_by_hand.measure import Results
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from tests.bench.test_clipping import lines_of
from tests.bench.test_profile import ranges
from tests.support.benchmark_command import PROGRESS, benchmark, parse

BOTH = ["--clipping", "none", "bookkeeping"]


def settings_for(*arguments, folder="folder"):
    return settings_from(parse([str(a) for a in arguments]), "cpu", folder)


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        *(("ddp", [0, 1, 2, 3]), ("fsdp2", [0, 1, 2, 3])),
        *(("tp", [0, 0, 0, 0]), ("fsdp2_tp", [0, 0, 1, 1])),
    ],
)
def test_ranks_of_a_tensor_axis_see_the_same_batch(name, batches):
    layout = layout_of(name)
    assert [layout.data_place(rank, 4) for rank in range(4)] == [
        (batch, max(batches) + 1) for batch in batches
    ]


def test_gates_with_the_same_reference_stand_together():
    names = ["tp", "ddp", "fsdp2_tp", "fsdp2", "none"]
    gates = [c.subject for c in plan(settings_for("--implementations", *names, *BOTH))]
    kinds = [(s.is_private, s.layout.tensor_ranks) for s in gates[: 2 * len(names)]]
    assert len(set(kinds)) == 1 + sum(a != b for a, b in pairwise(kinds))


def test_norm_reduction_is_a_setting_of_split_models_alone():
    names = ["--implementations", "ddp", "fsdp2", "tp", "fsdp2_tp", "--clipping", "ghost"]
    keys = {name: set() for name in names[1:5]}
    for how in NORM_REDUCTIONS:
        settings = settings_for(*names, "--norm-reduction", how)
        for cell in plan(settings):
            keys[cell.subject.implementation].add(cell.row(settings, 4, "cpu")["key"])
    counts = {name: len(found) // 6 for name, found in keys.items()}
    assert counts == {"ddp": 1, "fsdp2": 1, "tp": 3, "fsdp2_tp": 3}


def test_a_dry_run_tells_the_mesh(capsys, tmp_path):
    names = ["--implementations", "fsdp2", "tp", "fsdp2_tp", "--num-processes", "4"]
    line = ["--device", "cpu", "--output-dir", str(tmp_path), "--dry-run"]
    assert command.main([*line, *names]) == 0
    out = capsys.readouterr().out
    assert "\ntp: 1 data x 4 tensor-parallel ranks, which share a batch\n" in out
    assert "\nfsdp2_tp: 2 data x 2 tensor-parallel" in out
    assert "\nfsdp2: " not in out


def test_tokens_count_data_ranks_and_a_step_of_split_models_is_compared_with_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("ddp_by_hand.bench.report.draw_comparison", lambda *a, **k: None)
    names = ["--implementations", "none", "torch_ddp", "fsdp2", "tp", "fsdp2_tp"]
    settings = settings_for(*names, *BOTH, "--context-length", 50, folder=tmp_path)
    for cell in plan(settings):
        time = 200.0 if cell.subject.is_private else 100.0
        measured = {"gradient_error": 0.0} if cell.kind == GATE else {"step_ms": [time] * 6}
        row = {**cell.row(settings, 4, "cpu"), "status": "ok", "invocation": "x", **measured}
        Results(tmp_path).record(row)
    text, status = report(settings, 4, "cpu")
    table = {pair: line.split() for pair, line in lines_of(text).items()}
    assert status == 0
    assert {pair: row[6] for pair, row in table.items() if pair[1] == "none"} == {
        ("none", "none"): "16,000",
        ("torch_ddp", "none"): "16,000",
        ("fsdp2", "none"): "16,000",
        ("tp", "none"): "4,000",
        ("fsdp2_tp", "none"): "8,000",
    }
    assert table["fsdp2", "none"][7:12] == ["0.00", "–", "1.000", "1.000", "[1.000,"]
    for name in ("tp", "fsdp2_tp"):
        assert table[name, "none"][7:11] == ["–"] * 4
        assert table[name, "bookkeeping"][7:9] == ["–", "2.000"]
    assert "\ntp, fsdp2_tp  ranks of the tensor axis share a batch" in text
    assert "norms reduced async" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def profiled(folder):
    line = ["--profile", "--implementations", "fsdp2", "tp", "--clipping", "bookkeeping"]
    short = ["--dtype", "bfloat16", "--num-epochs", 1, "--warmup-epochs", 0]
    run = benchmark(*line, *short, "--profile-output-dir", folder / "profile")
    assert run.returncode == 0, run.stderr
    return folder / "profile"


@pytest.mark.slow
def test_a_private_trace_and_its_summary_show_what_crosses_ranks(profiled):
    """Of two steps."""
    sharded, split = (ranges(profiled, f"{name}_bookkeeping", 1) for name in ("fsdp2", "tp"))
    for found in (sharded, split):
        assert all(len(found[name]) == 2 for name in ("norm_pass", "weighted_sum", "noise"))
    assert "norm_all_reduce" not in sharded
    assert "reduce_scatter" not in split
    assert len(split["norm_all_reduce"]) >= 2
    for step, (start, end) in enumerate(sharded["weighted_sum"]):
        sent = [a for a, b in sharded["reduce_scatter"] if start <= a and b <= end]
        assert len(sent) == 3  # the two blocks, and what is left
        assert not any(
            a < sharded["norm_pass"][step][1] and b > sharded["norm_pass"][step][0]
            for a, b in sharded["reduce_scatter"]
        )
    split = (profiled / "tp_bookkeeping_summary.txt").read_text()
    for words in ("1 data x 2 tensor-parallel ranks", "norm_reduction", "\n    norm_all_reduce "):
        assert words in split, words
    sharded = (profiled / "fsdp2_bookkeeping_summary.txt").read_text()
    assert "\n    reduce_scatter " in sharded
    assert "norm_reduction" not in sharded


@pytest.mark.slow
def test_both_axes_on_four_ranks(tmp_path):
    line = ["--implementations", "none", "fsdp2_tp", "tp", *BOTH, "--num-processes", 4]
    heads = ["--num-heads", 4, "--steps-per-epoch", 1, "--rounds", 1]
    run = benchmark(*line, *heads, "--output-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    for pair, line in lines_of(run.stdout).items():
        assert float(line.split()[2]) < 1e-6, pair
    lines = run.stderr.splitlines()
    assert len(lines) == 2 * 3 * 2
    assert all(PROGRESS.match(line) for line in lines), run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["mixed", "bfloat16"])
def test_every_mode_in_sixteen_bit(tmp_path, dtype):
    modes = ["none", "per_sample", "ghost", "flash", "bookkeeping", "flash_bookkeeping"]
    line = ["--implementations", "fsdp2", "fsdp2_root", "tp", "--clipping", *modes]
    run = benchmark(*line, "--dtype", dtype, "--rounds", 1, "--output-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(lines_of(run.stdout)) == 3 * 6
