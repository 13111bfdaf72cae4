"""Rows read back as cells: which rounds belong together, what is compared with what."""

import json
import re

import pytest

from ddp_by_hand.measure import Results
from ddp_by_hand.measure.runs import (
    beside,
    differing,
    memory_beside,
    ratio_beside,
    read_cells,
    varying,
)
from tests.support.rows import llama_row, record_benchmark, steps


def by_label(cells):
    return {cell.label: cell for cell in cells}


def test_rounds_of_the_benchmark_become_cells(tmp_path):
    medians = {"none": 10.0, "ddp": 12.0, ("ddp", "ghost"): 20.0, "lost": "oom"}
    cells = by_label(read_cells(record_benchmark(tmp_path, medians)))
    assert list(cells) == ["none", "ddp", "ddp, ghost", "lost"]
    ddp = cells["ddp"]
    assert ddp.times() == {number: pytest.approx(steps(12.0, number)) for number in range(5)}
    assert (ddp.status, ddp.gradient_error, ddp.is_wrong) == ("ok", 1e-7, False)
    assert (ddp.peak_memory_mb, ddp.tokens_per_step) == (100.0, 8 * 128)
    assert ddp.metrics == ["step_ms"]  # warm-up is no measurement
    assert (cells["lost"].status, cells["lost"].reason) == ("oom", "no more")
    assert "clipping.mode" not in cells["ddp, ghost"].settings
    assert cells["ddp, ghost"].settings["clipping.noise_multiplier"] == 1.0


def test_rows_and_files_of_the_grid_say_the_same(tmp_path):
    """A row holds one round of a cell; one that failed does not know the network's sizes."""
    whole = llama_row("no_dp", 32, 5.0)
    for one in whole["rounds"]:
        Results(tmp_path).record({**whole, "key": str(one["round"]), "rounds": [one]})
    (from_rows,) = read_cells(tmp_path)
    failed = {"round": 5, "status": "oom", "reason": "no more", "step_ms": []}
    lost = {**llama_row("no_dp", 32, "oom"), "key": "5", "rounds": [failed]}
    Results(tmp_path).record(lost)
    (with_failure,) = read_cells(tmp_path / "results.jsonl")
    (tmp_path / "no_dp_seq32_result.json").write_text(json.dumps(whole))
    (from_files,) = read_cells(tmp_path)  # files count
    assert (from_files.tokens_per_step, from_files.status) == (2 * 32, "ok")
    assert from_rows.times() == from_files.times() == with_failure.times()
    assert with_failure.status == "ok"
    assert [one.number for one in with_failure.failures] == [5]
    assert from_files.failures == []


def test_the_newest_row_of_a_round_counts(tmp_path):
    record_benchmark(tmp_path, {"ddp": "oom"})
    record_benchmark(tmp_path, {"ddp": 12.0})
    (cell,) = read_cells(tmp_path)
    assert (cell.status, len(cell.samples())) == ("ok", 30)


def test_a_failed_proof_is_a_failed_cell_and_one_without_times_is_missing(tmp_path):
    record_benchmark(tmp_path, {"ddp": 12.0})
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    gate = {**rows[0], "status": "error", "reason": "it raised"}
    del gate["gradient_error"]
    Results(tmp_path).record(gate)
    (cell,) = read_cells(tmp_path)
    assert (cell.status, cell.reason) == ("error", "it raised")
    (cell,) = read_cells(record_benchmark(tmp_path / "other", {"ddp": 12.0}, rounds=0))
    assert (cell.status, cell.reason) == ("missing", "not measured yet")


@pytest.mark.parametrize("error", [1e-3, float("inf"), float("nan")])
def test_a_wrong_gradient_is_known(tmp_path, error):
    (cell,) = read_cells(record_benchmark(tmp_path, {"ddp": 12.0}, error={"ddp": error}))
    assert cell.is_wrong


def test_a_baseline_differs_in_one_name_and_does_the_same_work(tmp_path):
    medians = {"none": 10.0, "ddp": 12.0, ("none", "ghost"): 15.0, ("ddp", "ghost"): 20.0}
    record_benchmark(tmp_path, medians)
    record_benchmark(tmp_path, {"none": 30.0}, config={"batch_size": 8})
    cells = read_cells(tmp_path)
    assert varying(cells) == ["batch_size"]
    none, ddp, private_none, private, larger = cells
    assert beside(cells, ddp, "implementation", "none") is none
    assert beside(cells, private, "implementation", "none") is private_none
    assert beside(cells, private, "clipping", "none") is ddp
    assert beside(cells, none, "implementation", "none") is None
    assert beside([ddp, larger], ddp, "implementation", "none") is None
    assert differing(none.settings, larger.settings) == ["batch_size"]
    assert ratio_beside(ddp, none).value == pytest.approx(1.2)


def test_memory_is_compared_where_both_are_known(tmp_path):
    record_benchmark(tmp_path, {"none": 10.0, "lost": "oom"})
    record_benchmark(tmp_path, {"ddp": 12.0}, memory=150)
    none, lost, ddp = read_cells(tmp_path)
    assert memory_beside(ddp, none) == 1.5
    assert memory_beside(lost, none) is memory_beside(ddp, lost) is memory_beside(ddp, None) is None


def test_ranks_that_share_a_batch_have_no_ratio(tmp_path):
    record_benchmark(tmp_path, {"none": 10.0, "tp": 12.0})
    text = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in text]
    for row in rows:
        if row["implementation"] == "tp" and "total_batch_size" in row:
            Results(tmp_path).record({**row, "total_batch_size": 4})
    none, tp = read_cells(tmp_path)
    assert beside([none, tp], tp, "implementation", "none") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such folder or file"),
        ("", "no results there"),
        ("not json\n", "line 1: not a JSON line"),
        ('{"schema_version": 0}\n', "schema version 0"),
        ('{"schema_version": 1, "status": "ok"}\n', "a row has no key"),
        ('{"schema_version": 1, "key": "k", "status": "ok"}\n', "no implementation and no mode"),
        ('{"schema_version": 1, "key": "k", "implementation": "x"}\n', "no 'status'"),
        ('{"schema_version": 1, "key": "k", "implementation": "x", "round": 0, "status": "?"}\n',
         "status '?'"),
        ('{"schema_version": 1, "key": "k", "implementation": "x", "round": 0, "status": "ok", '
         '"step_ms": [1, -1]}\n', "step_ms has a time that is not positive"),
        ('{"schema_version": 1, "key": "k", "implementation": "x", "round": 0, "status": "ok", '
         '"step_ms": [null]}\n', "line 1: not a row of results: step_ms[0] is null, not a number"),
    ],
)  # fmt: skip
def test_what_is_no_results_is_refused_by_name(tmp_path, content, said):
    folder = tmp_path / "results"
    if content is not None:
        folder.mkdir()
        (folder / "results.jsonl").write_text(content)
    with pytest.raises(ValueError) as refused:
        read_cells(folder)
    assert said in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"config": "x"}, "config is text, not an object"),
        ({"config": [1]}, "config is a list, not an object"),
        ({"environment": 3}, "environment is a number, not an object"),
        ({"environment": {"gpus": ["H200"]}}, "environment.gpus[0] is text, not an object"),
        ({"environment": {"gpus": [{"memory_mb": "much"}]}},
         "environment.gpus[0].memory_mb is text, not a number"),
        ({"environment": {"git_commit": 7}}, "environment.git_commit is a number, not text"),
        ({"step_ms": [1.0, "2"]}, "step_ms[1] is text, not a number"),
        ({"rounds": "x"}, "rounds is text, not a list"),
        ({"rounds": [1]}, "rounds[0] is a number, not an object"),
        ({"rounds": [{"step_ms": [True]}]}, "rounds[0].step_ms[0] is true or false, not a number"),
        ({"implementation": ["a"]}, "implementation is a list, not text"),
        ({"peak_memory_bytes": "x"}, "peak_memory_bytes is text, not a number"),
        ({"phases_ms": {"norms": None}}, "phases_ms.norms is null, not a number"),
        ({"command": "python x"}, "command is text, not a list"),
        ({"key": []}, "key is a list, not text"),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_named_with_its_line(tmp_path, changed, said):
    path = record_benchmark(tmp_path, {"ddp": 10.0}) / "results.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | changed)]) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line {len(lines) + 1}: ")) as refused:
        read_cells(tmp_path)
    assert said in str(refused.value)
