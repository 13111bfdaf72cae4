"""What is faster, slower, the same or not to be compared between two results; the exit status."""

import json
import re
import shutil

import numpy as np
import pytest

from ddp_by_hand.measure.compare import FASTER, SLOWER, UNCHANGED, UNCLEAR, main, verdict
from ddp_by_hand.measure.statistics import Ratio
from tests.support.rows import record_benchmark, steps, write_llama
from tests.support.wrong_input import is_one_line


@pytest.fixture
def compare(tmp_path, capsys):
    """Two results of the benchmark, by their medians -> status, output, error."""

    def run(before: dict, after: dict, *options: str, then: dict | None = None):
        shutil.rmtree(tmp_path, ignore_errors=True)
        record_benchmark(tmp_path / "a", before)
        record_benchmark(tmp_path / "b", after, **(then or {}))
        status = main([str(tmp_path / "a"), str(tmp_path / "b"), *options])
        return status, *capsys.readouterr()

    return run


def line(text: str, name: str) -> list[str]:
    found = next(line for line in text.splitlines() if line.startswith(f"{name} "))
    return re.split(r"  +", found)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.06, 1.3, SLOWER), (1.04, 1.3, UNCLEAR), (0.96, 1.04, UNCHANGED), (1.0, 1.0, UNCHANGED),
        (0.7, 0.95, FASTER), (0.7, 0.96, UNCLEAR), (0.9, 1.1, UNCLEAR), (1.05, 1.05, UNCHANGED),
    ],
)  # fmt: skip
def test_a_verdict_needs_the_whole_interval(low, high, expected):
    assert verdict(Ratio((low + high) / 2, low, high), 0.05) == expected
    mirrored = {SLOWER: FASTER, FASTER: SLOWER}.get(expected, expected)
    assert verdict(Ratio(2 / (low + high), 1 / high, 1 / low), 0.05) == mirrored


def test_a_regression_is_said_and_is_the_exit_status(compare):
    before = {"none": 10.0, "ddp": 12.0, "torch_ddp": 13.0}
    status, out, error = compare(before, {"none": 10.0, "ddp": 15.0, "torch_ddp": 10.0})
    assert (status, error) == (1, "")
    cells = line(out, "ddp")
    median = [f"{np.median([steps(x, n) for n in range(5)]):.2f}" for x in (12.0, 15.0)]
    assert cells[1:3] == median
    value, low, high = map(float, re.findall(r"[\d.]+", cells[3]))
    assert value == pytest.approx(1.25, abs=6e-4)
    assert low <= value <= high
    assert cells[4:] == ["slower", "100", "100", "1.000", "same"]
    assert line(out, "none")[4] == "same"
    assert line(out, "torch_ddp")[4] == "faster"
    assert out.splitlines()[-1].startswith("1 regression beyond 5 %: ddp is slower, 1.250 [1.2")


ONE, TWO, OLD = {"ddp": 10.0}, {"none": 10.0, "ddp": 12.0}, {"none": 10.0, "old": 1.0}
ELSEWHERE = {"torch": "2.11.0", "gpus": [], "git_commit": "f" * 40, "git_dirty": False}
GIVE = "ddp_by_hand.measure.compare: no cell can be compared: give results of the same settings\n"
ROWS = {  # before, after, options and what else differs, status, said (cells are apart by |)
    "no regression": (
        TWO, {"none": 10.1, "ddp": 9.0}, [], {}, 0,
        ["\nNo regression beyond 5 %: 1 same, 1 faster.\n"],
    ),
    "within the threshold": (ONE, {"ddp": 11.0}, ["--threshold", "0.2"], {}, 0, []),
    "beyond the threshold": (ONE, {"ddp": 11.0}, ["--threshold", "0.02"], {}, 1, []),
    "more memory": (
        ONE, ONE, [], {"memory": 110}, 1,
        ["| 100 | 110 | 1.100 | larger\n",
         "1 regression beyond 5 %: ddp takes more memory, 1.100."],
    ),
    "less memory": (ONE, ONE, [], {"memory": 90}, 0, ["| smaller\n"]),
    "fails since": (
        TWO, TWO | {"ddp": "oom"}, [], {}, 1,
        ["ddp | failed: now oom: no more", "ddp has failed (now oom: no more)"],
    ),
    "failed before": (
        TWO | {"ddp": "oom"}, TWO, [], {}, 0, ["ddp | not comparable: before oom: no more"],
    ),
    "unavailable since": (TWO, TWO | {"ddp": "unavailable"}, [], {}, 0, []),
    "a wrong gradient since": (
        TWO, TWO | {"ddp": 8.0}, [], {"error": {"ddp": 1.0}}, 1,
        ["ddp | failed: now wrong: gradient error 1.0e+00"],
    ),
    "one lacks a cell": (  # nobody knows whether it has become slower
        OLD, {"none": 10.0, "new": 2.0}, [], {}, 1,
        ["only in A: old\n", "only in B: new\n",
         "Missing in B: old; give --allow-missing if B has less.\n"],
    ),
    "which is allowed": (OLD, {"none": 10.0}, ["--allow-missing"], {}, 0, []),
    "and hides nothing": (OLD, {"none": 20.0}, ["--allow-missing"], {}, 1, []),
    "it never had a time": ({"none": 10.0, "old": "oom"}, {"none": 10.0}, [], {}, 0, []),
    "other settings": (
        TWO, TWO, [], {"config": {"batch_size": 8}}, 2,
        ["| not comparable: batch_size 4, then 8", GIVE],
    ),
    "another machine": (
        ONE, ONE, [], {"environment": ELSEWHERE}, 0,
        ["torch: 2.13.0 in A, 2.11.0 in B\n",
         "GPUs: 2 × NVIDIA H200, 143,771 MiB in A, none in B\n",
         "commit: 0123456789ab with changes in A, ffffffffffff in B\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_is_said_and_the_exit_status(compare, name):
    before, after, options, then, status, says = ROWS[name]
    found, out, error = compare(before, after, *options, then=then)
    assert (found, error) == (status, GIVE if status == 2 else "")
    text = re.sub(" {2,}", " | ", out) + error
    assert [one for one in says if one not in text] == [], text
    lacks = name == "one lacks a cell"
    assert (("No regression" in out), ("Missing" in out)) == (status == 0 or lacks, lacks)
    assert "cpu:" not in out


def test_cells_of_one_name_are_told_apart(tmp_path, capsys):
    for folder, sizes, median in (("a", (2, 4, 8), 10.0), ("b", (4, 16), 20.0)):
        for size in sizes:
            record_benchmark(tmp_path / folder, {"ddp": median}, config={"batch_size": size})
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "only in A: ddp (batch_size 2); ddp (batch_size 8)\n" in out
    assert "only in B: ddp (batch_size 16)\n" in out
    assert "ddp (batch_size 4) is slower" in out


@pytest.mark.parametrize(
    ("rounds", "factor", "status", "said"),
    [
        ((5, 2), 1.3, 0, "unclear"), ((5, 2), 1.0, 0, "unclear"), ((5, 2), 3.0, 1, "slower"),
        ((5, 3), 1.3, 1, "slower"), ((7, 3), 1.2, 1, "slower"),
    ],
)  # fmt: skip
def test_of_two_rounds_only_a_great_difference_counts(
    tmp_path, capsys, rounds, factor, status, said
):
    """More rounds or steps of one result do not matter, but are said."""
    for folder, count, ms in zip("ab", rounds, (10.0, 10.0 * factor), strict=True):
        config = {"steps_per_epoch": 2 * count}
        record_benchmark(tmp_path / folder, {"ddp": ms}, rounds=count, config=config)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == status
    out = capsys.readouterr().out
    assert line(out, "ddp")[4] == said
    assert f"steps_per_epoch: {2 * rounds[0]} in A, {2 * rounds[1]} in B\n" in out
    assert f"Intervals rest on {rounds[1]} rounds" in out
    assert ("below 3 only what takes 2 times as long" in out) == (rounds[1] == 2)


def test_rounds_are_not_paired(tmp_path, capsys):
    """Rounds that differ alike in both do not cancel: they were not measured side by side."""
    for folder in "ab":
        record_benchmark(tmp_path / folder, {"ddp": 10.0})
        path = tmp_path / folder / "results.jsonl"
        rows = [json.loads(text) for text in path.read_text().splitlines()]
        for row in rows:
            if row["kind"] == "timing":
                row["step_ms"] = [10.0 * 1.5 ** row["round"]] * 6
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert line(capsys.readouterr().out, "ddp")[4] == "unclear"


def test_the_grid_and_another_metric(tmp_path, capsys):
    cells = {("no_dp", 32): 10.0, ("no_dp", 64): 20.0, ("flash_fsdp", 64): "oom"}
    write_llama(tmp_path / "a", cells)
    write_llama(tmp_path / "b", cells | {("no_dp", 64): 30.0})
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert line(out, "no_dp, 64 tokens")[4] == "slower"
    assert line(out, "flash_fsdp, 64 tokens")[1] == "not comparable: before oom: no more"
    both = [str(tmp_path / "a"), str(tmp_path / "b"), "--metric"]
    assert main([*both, "forward_backward_ms"]) == 1
    part = 0.9 * np.median([steps(20.0, n) for n in range(5)])
    assert line(capsys.readouterr().out, "no_dp, 64 tokens")[1] == f"{part:.2f}"
    assert main([*both, "nothing"]) == 2
    error = capsys.readouterr().err
    assert "--metric nothing: not in " in error
    assert error.endswith("which has forward_backward_ms, step_ms\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "gone"], "gone: no such folder or file"),
        (["a", "a", "--threshold", "-1"], "--threshold -1.0: give 0 or more"),
        (["a", "a", "--threshold", "nan"], "--threshold nan: give"),
        (["a", "a", "--threshold", "5"], "--threshold 5: give a fraction below 1, 0.05 for 5 %"),
        (["a", "a", "--metric", "x"], "--metric x: not in a, which has step_ms"),
        (["a"], "the following arguments are required: B"),
        (["a", "failed"], None),
        (["a", "other"], "no cell can be compared"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    record_benchmark(tmp_path / "a", {"ddp": 10.0})
    record_benchmark(tmp_path / "other", {"another": 10.0})
    record_benchmark(tmp_path / "failed", {"ddp": "error"})
    if said is None:  # a failure of all is a regression, not bad input
        assert (main(arguments), capsys.readouterr().err) == (1, "")
        return
    said = re.compile(f"^ddp_by_hand.measure.compare: .*{re.escape(said)}")
    is_one_line(main, arguments, said, capsys)
