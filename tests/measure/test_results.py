"""Results resume: finished cells are known, the newest row wins, other versions are refused."""

import json

import numpy as np
import pytest

from ddp_by_hand.measure import results as room
from ddp_by_hand.measure.results import Results, cell_key


def _row(status, key="k", **more):
    return {"key": key, "status": status, **more}


def test_cell_key_is_stable_and_ignores_order():
    config = {"name": "x", "shape": (1, 2), "deep": {"a": 1, "b": None}}
    same = {"deep": {"b": None, "a": 1}, "shape": [1, 2], "name": "x"}
    assert cell_key(config) == cell_key(same)
    assert cell_key({"a": 1}) == "f9d86028c6e0d64e"  # results on disk depend on it
    assert cell_key({"a": 1}) == cell_key({"a": np.int64(1)})
    assert cell_key({"a": 1}) != cell_key({"a": 2})
    with pytest.raises(ValueError, match="JSON compliant"):
        cell_key({"a": float("nan")})


def test_nothing_is_created_before_the_first_row(tmp_path):
    results = Results(tmp_path / "new" / "folder")
    assert results.rows() == []
    assert not results.finished("k")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", room.STATUSES)
def test_finished_means_ok_or_unavailable(tmp_path, status):
    Results(tmp_path).record(_row(status))
    assert Results(tmp_path).finished("k") == (status in ("ok", "unavailable"))
    assert not Results(tmp_path).finished("another")


def test_finished_is_what_the_newest_row_says(tmp_path):
    results = Results(tmp_path)
    results.record(_row("oom", "a"))
    results.record(_row("ok", "b", samples=[1, 2]))
    results.record(_row("ok", "a", samples=[3]))
    assert [(row["key"], row["status"]) for row in results.rows()] == [("a", "ok"), ("b", "ok")]
    assert results.finished("a")
    results.record(_row("error", "b"))
    assert not results.finished("b")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4
    results = Results(tmp_path)
    results.record(_row("ok", "a"))
    results.record(_row("ok", "b"))
    whole = results.path.read_bytes()
    results.path.write_bytes(whole[:-5])
    assert Results(tmp_path).finished("a")
    assert not Results(tmp_path).finished("b")
    results.record(_row("ok", "b"))
    assert results.path.read_bytes() == whole


def test_key_follows_from_config_and_version_is_written(tmp_path):
    config = {"name": "x", "round": 0}
    Results(tmp_path).record({"status": "ok", "config": config})
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["schema_version"] == room.SCHEMA_VERSION
    assert row["key"] == cell_key(config)


def test_numbers_that_json_does_not_know(tmp_path):
    row = _row("ok", loss=float("nan"), times=np.array([1.0, np.inf]), n=np.int64(3), path=tmp_path)
    Results(tmp_path).record(row)
    back = Results(tmp_path).rows()[0]
    assert (back["loss"], back["times"], back["n"]) == (None, [1.0, None], 3)
    assert back["path"] == str(tmp_path)


@pytest.mark.parametrize("line", ['{"schema_version": 2, "key": "k"}', '{"key": "k"}', "[]"])
def test_what_is_no_row_of_results_is_refused_on_one_line(tmp_path, line):
    with pytest.raises(ValueError, match="'done' is unknown; known: ok, oom"):
        Results(tmp_path).record(_row("done"))
    path = tmp_path / "results.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="schema version") as caught:
        Results(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="is a file"):
        Results(path)


def test_the_fastest_round_counts(tmp_path):
    """Groups rounds by what is asked of the configuration, and takes the fastest of each."""
    results = Results(tmp_path)
    for key, status, size, steps in [
        ("a", "ok", 1, [5.0, 9.0, 7.0]), ("b", "ok", 1, [6.0, 6.0, 8.0]), ("c", "ok", 2, [3.0]),
        ("d", "oom", 1, None),
    ]:  # fmt: skip
        results.record(_row(status, key, kind="timing", implementation="none", step_ms=steps,
                            config={"size": size}))  # fmt: skip
    results.record(_row("ok", "e", kind="gate", implementation="none", config={"size": 1}))
    found = results.fastest_rounds("timing", lambda config: config["size"])
    assert found == {1: {"none": 6.0}, 2: {"none": 3.0}}
