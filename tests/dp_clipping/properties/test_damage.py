"""A checkpoint that is damaged anywhere is refused, or loads as it was; nothing else happens."""

import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dp_clipping
from dp_clipping.checkpoint.file_format import DETAILS, key_path, write_sealed
from tests.support.saved_runs import build, keys_of, load, save, state, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a run's state, its file, the file's bytes, those of its keys)."""
    path = tmp_path_factory.mktemp("saved") / "run.pt"
    run = build()
    train(run, 2)
    save(run, path)
    return state(run), path, path.read_bytes(), key_path(path).read_bytes()


PLACES = st.integers(0, 10**6 - 1)
WAYS = ("changed", "cut off", "inserted", "zeros", "swapped")


def damaged(content: bytes, place: int, way: str, number: int) -> bytes:
    at = place * len(content) // 10**6
    if way == "changed":
        return content[:at] + bytes([content[at] ^ number]) + content[at + 1 :]
    if way == "cut off":
        return content[:at]
    if way == "inserted":
        return content[:at] + bytes([number]) + content[at:]
    if way == "zeros":
        return content[:at] + bytes(len(content[at : at + number])) + content[at + number :]
    return content[at:] + content[:at]


@pytest.mark.parametrize("way", WAYS)
@given(PLACES, st.integers(1, 255), st.integers(0, 3))
def test_a_damaged_file_is_refused_whole_or_loads_as_it_was(saved, way, place, number, which):
    of_keys = which == 0  # the file of keys, or three times as often that of the run
    before, path, content, keys = saved
    fresh = build(seed=1)
    untouched = state(fresh)
    file = key_path(path) if of_keys else path
    file.write_bytes(damaged(keys if of_keys else content, place, way, number))
    said = None
    try:
        load(fresh, path)
    except ValueError as error:
        said = str(error)
    finally:
        path.write_bytes(content)
        key_path(path).write_bytes(keys)
    assert "\n" not in (said or "")
    assert state(fresh) == (before if said is None else untouched)


def test_an_undamaged_one_loads(saved):
    before, path, *_ = saved
    fresh = build(seed=1)
    load(fresh, path)
    assert state(fresh) == before


# Changed and sealed again, as by somebody with the key, or by another version

REMOVED = object()
VALUES = {
    "removed": REMOVED, "None": None, "minus": -1, "str": "x", "nan": math.nan, "inf": math.inf,
    "huge": 2**70, "list": [], "dict": {}, "True": True, "tensor": torch.ones(2),
}  # fmt: skip


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """(a run's keys, a file for changed ones, its entries, where each is)."""
    path = tmp_path_factory.mktemp("entries") / "run.pt"
    run = build()
    train(run, 2)
    save(run, path)
    contents = torch.load(path)
    return keys_of(run), path, contents, list(places(contents))


def places(entry: Any, at: tuple = ()) -> Iterator[tuple]:
    if at:
        yield at
    if isinstance(entry, dict | list | tuple) and len(entry) < 40:  # longer: random states
        for key in entry if isinstance(entry, dict) else range(len(entry)):
            yield from places(entry[key], (*at, key))


def with_entry(entry: Any, at: tuple, value: Any) -> Any:
    """Returns the entries with another value at a place, or without what is there."""
    key, *rest = at
    copied = dict(entry) if isinstance(entry, dict) else list(entry)
    if rest:
        copied[key] = with_entry(entry[key], tuple(rest), value)
    elif value is REMOVED:
        del copied[key]
    else:
        copied[key] = value
    return copied if isinstance(entry, dict | list) else tuple(copied)


def fault_of(entries: Any, at: tuple, value: Any) -> str | None:
    """Returns how a load of changed entries ends if it is not as it should; None if it is."""
    keys, path, contents, _ = entries
    write_sealed(path, with_entry(contents, at, value), keys, {})
    fresh = build(seed=1)
    untouched = state(fresh)
    try:
        load(fresh, path)
    except Exception as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        is_ours = last.is_relative_to(Path(dp_clipping.__file__).parent)
        if type(error) is not ValueError or not is_ours or "\n" in str(error):
            return f"raises {error!r}"
        return None if state(fresh) == untouched else "changes what it refuses"
    return None


@given(PLACES, st.sampled_from([*VALUES]))
@pytest.mark.filterwarnings("ignore")
def test_another_entry_is_refused_whole_or_taken(entries, place, value):
    where = entries[3]
    at = where[place * len(where) // 10**6]
    assert fault_of(entries, at, VALUES[value]) is None, (at, value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_any_other_entry_is_refused_whole_or_taken(entries):
    found = {
        (at, name): fault
        for at in entries[3]
        for name, value in VALUES.items()
        if (fault := fault_of(entries, at, value)) is not None
    }
    assert not found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        ((DETAILS, "version"), torch.ones(2), "has version a Tensor, this program reads"),
        ((DETAILS, "run", "sample_rate"), torch.ones(2), "run is not what a save writes"),
        (("privacy_accountant_state_dict", "history"), [], "its account has 0 steps, and the run"),
        (("privacy_accountant_state_dict", "history", 0, 0), math.inf, "is not what a save writes"),
        (("privacy_accountant_state_dict", "history", 0, 1), 2.0, "is not what a save writes"),
    ],
)
def test_an_account_that_cannot_be_right_is_refused(entries, at, value, says):
    keys, path, contents, _ = entries
    write_sealed(path, with_entry(contents, at, value), keys, {})
    with pytest.raises(ValueError, match=says):
        load(build(seed=1), path)
