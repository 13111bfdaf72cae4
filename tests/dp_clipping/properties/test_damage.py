"""A checkpoint that is damaged anywhere is refused, or loads as it was; nothing else happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_clipping.checkpoint.file_format import key_path
from tests.support.saved_runs import build, load, save, state, train


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
