"""A kill at any moment loses nothing."""

import os
from pathlib import Path

import pytest
import torch

from dp_clipping.checkpoint.file_format import _Hashing, key_path
from dp_clipping.noise.keys import read_keys
from tests.support.saved_runs import build, keys_of, load, save, train, trained

pytestmark = pytest.mark.filterwarnings("error")


class Crash(BaseException):
    """Nothing after it runs, as after a kill."""


def guard_operations(monkeypatch, crash_at=None):
    """Counts moments before and after what changes the disk, and crashes at one of them."""
    count = [0]

    def tick():
        count[0] += 1
        if count[0] == crash_at:
            raise Crash

    def guarded(real):
        def operation(*args, **kwargs):
            tick()
            result = real(*args, **kwargs)
            tick()
            return result

        return operation

    for owner, name in ((os, "replace"), (os, "fsync"), (torch, "save")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    # A kill unlinks no temporary file.
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    return count


class TestKilled:
    def test_between_any_two_operations(self, path, monkeypatch):
        """A run with a new key saves over the checkpoint of an old run: the worst case."""
        old, new = build(seed=1), trained(1, seed=2)
        save(old, path)
        files = [(file, file.read_bytes()) for file in (path, key_path(path))]
        with monkeypatch.context() as patch:
            count = guard_operations(patch)
            save(new, path)
        assert count[0] > 18
        found = set()
        resumed = build(seed=3)
        for crash_at in range(1, count[0] + 1):
            for file, content in files:
                file.write_bytes(content)
            with monkeypatch.context() as patch:
                guard_operations(patch, crash_at)
                with pytest.raises(Crash):
                    save(new, path)
            load(resumed, path)
            is_new = resumed.optimizer.steps == 1
            assert keys_of(resumed) == keys_of(new if is_new else old)
            found.add(is_new)
            save(new, path)  # and the next save cleans up
            assert read_keys(key_path(path)) == [keys_of(new)]
        assert found == {False, True}


UNFIT = {
    r"runs is a folder: give the name of a file, as \S*runs/run\.pt$": {"path": "runs"},
    r"runs is a folder: give the name of a file, as \S*runs/run\.pt\.key$": {"key_path": "runs"},
    r"there is no folder \S*missing: make it first": {"path": "missing/run.pt"},
    r"there is no folder \S*keys: make it first": {"key_path": "keys/own.key"},
    "not a key file": {"key_path": "broken.key"},
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_place_that_is_refused_has_nothing_written_beside_it(message, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "broken.key").write_text("broken")
    before, run = sorted(tmp_path.rglob("*")), build()
    places = {"path": "run.pt", "key_path": "own.key"} | UNFIT[message]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        save(run, **{name: tmp_path / place for name, place in places.items()})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_while_writing_is_an_interrupt(tmp_path, monkeypatch, at):
    """PyTorch's own error, which it raises on the way out, does not hide it."""
    write, calls = _Hashing.write, []

    def interrupted(file, data):
        calls.append(data)
        if len(calls) == at:
            raise KeyboardInterrupt
        return write(file, data)

    run, path = build(), tmp_path / "run.pt"
    train(run, 1)
    monkeypatch.setattr(_Hashing, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(run, path)
    assert not path.exists()


def test_an_account_of_fewer_steps_than_the_run_is_no_whole_checkpoint(path, monkeypatch):
    """Also if a program has shortened it and has sealed the file again."""
    run = trained(2)
    state = run.engine._account.accountant.state_dict()
    (sigma, rate, _), *_ = state["history"]
    with monkeypatch.context() as patch:
        shorter = state | {"history": [(sigma, rate, 1)]}
        patch.setattr(type(run.engine._account.accountant), "state_dict", lambda *_: shorter)
        save(run, path)
    with pytest.raises(ValueError, match="its account has 1 steps, and the run has taken 2"):
        load(build(), path)
