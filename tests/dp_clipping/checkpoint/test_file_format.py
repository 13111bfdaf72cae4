"""What cannot be gone on from is refused whole, and a kill at any moment loses nothing."""

import multiprocessing
import os
import pickle
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from opacus.schedulers import ExponentialNoise, StepGradClip
from torch import nn

from dp_clipping.checkpoint.file_format import _Hashing, key_path, write_sealed
from dp_clipping.noise.keys import Keys, read_keys
from tests.support import engine
from tests.support.saved_runs import adamw, build, data, edit, keys_of, load, save, state, train

pytestmark = pytest.mark.filterwarnings("error")


class TestRefused:
    """On one line, and nothing is changed."""

    def refused(self, run, path, match, **more):
        before = state(run), run.loader.state_dict(), keys_of(run)
        random_state = torch.get_rng_state()
        with pytest.raises(ValueError, match=match) as caught:
            load(run, path, **more)
        assert "\n" not in str(caught.value)
        assert (state(run), run.loader.state_dict(), keys_of(run)) == before
        assert torch.equal(torch.get_rng_state(), random_state)

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"hidden": 6}, r"first.weight is \[5, 3\] in the checkpoint and \[6, 3\] in this"),
            ({"make": adamw}, "optimizer is SGD in the checkpoint and AdamW"),
            ({"accountant": "prv"}, "accountant is rdp in the checkpoint and prv"),
            ({"grad_sample_mode": "no_dp"}, "private is True in the checkpoint and False"),
            ({"count": 48}, "num_samples is 24 in the checkpoint and 48"),
        ],
    )
    def test_another_run(self, path, changes, match):
        one = build()
        train(one, 1)
        save(one, path)
        self.refused(build(**changes), path, match)

    def test_other_parameters(self, path):
        save(build(), path)
        run = engine.build(module=nn.Linear(3, 2), dataset=data(), noise_multiplier=0.8)
        self.refused(run, path, "first.weight is .* in the checkpoint and missing in this model")

    @pytest.mark.parametrize(
        ("scale", "there"), [(torch.ones(2), r"\[2\] torch.float32"),
                             (torch.tensor(1.0, dtype=torch.float64), r"\[\] torch.float64")],
    )  # fmt: skip
    def test_another_buffer(self, path, scale, there):
        save(build(), path)
        other = build()
        other.model.network.scale = scale
        match = rf"entry scale is \[\] torch.float32 in the checkpoint and {there} in this model"
        self.refused(other, path, match)

    def test_other_groups_of_the_optimizer(self, path):
        def two_groups(parameters):
            first, *rest = parameters
            return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)

        save(build(), path)
        self.refused(build(make=two_groups), path, r"groups is \[4\] .* and \[1, 3\]")

    @pytest.mark.parametrize(
        "content", [b"garbage" * 99, pickle.dumps({"a": print}, 2), b"\x80\x02."]
    )
    def test_garbage(self, path, content):
        path.write_bytes(content)
        self.refused(build(), path, "is not a whole checkpoint")

    def test_code_is_not_executed(self, path):
        class Trap:
            def __reduce__(self):
                return (os.mkdir, (str(path) + ".trap",))

        write_sealed(path, {"module_state_dict": Trap()}, Keys(bytes(32)), {})
        self.refused(build(), path, "UnpicklingError: Weights only load failed")
        unsafe = {"torch_load_kwargs": {"weights_only": False}}
        self.refused(build(), path, "would execute code", **unsafe)
        assert not os.path.exists(str(path) + ".trap")

    def test_a_file_of_opacus_or_of_another_version(self, path):
        run = build()
        torch.save({"module_state_dict": {}}, path)
        self.refused(run, path, "or written by another program than save_checkpoint")
        save(run, path)
        edit(run, path, lambda saved: saved["dp_clipping"].update(version=3))
        self.refused(run, path, "has version 3, this program reads 2")
        save(run, path)
        edit(run, path, lambda saved: saved["dp_clipping"].pop("steps"))
        self.refused(run, path, "KeyError: 'steps'")

    def test_no_file(self, path):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            load(build(), path)

    def test_another_scheduler(self, path):
        one = build()
        save(one, path, noise_scheduler=ExponentialNoise(one.optimizer, gamma=0.9))
        scheduler = StepGradClip(one.optimizer, step_size=2, gamma=0.5)
        self.refused(one, path, "state of the noise_scheduler", noise_scheduler=scheduler)

    def test_replacing_parameters(self, path):
        run = build()
        save(run, path)
        self.refused(run, path, "assign=True", module_load_dict_kwargs={"assign": True})

    @pytest.mark.parametrize(
        ("entry", "match"),
        [
            ({"best": object()}, "best holds something that cannot be loaded"),
            ({"loss": nn.Linear(1, 1)}, "loss holds something"),
            ({"f": lambda: 0}, "f holds something"),
            ({"module_state_dict": 1}, "module_state_dict, which are written here"),
        ],
    )
    def test_saving_what_could_not_be_loaded(self, path, entry, match):
        run = build()
        save(run, path)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=match):
            save(run, path, checkpoint_dict=entry)
        assert path.read_bytes() == before


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
        old, new = build(seed=1), build(seed=2)
        train(new, 1)
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

    @pytest.mark.slow
    def test_by_sigkill_at_random_moments(self, path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once
        chance = random.Random(4)
        fingerprints = set()
        for _ in range(20):
            process = context.Process(target=save_for_ever, args=(path, started := context.Event()))
            process.start()
            assert started.wait(60)
            time.sleep(chance.uniform(0, 0.2))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            run = build()
            load(run, path)
            fingerprints.add(keys_of(run).fingerprint)
        assert len(fingerprints) > 10


def save_for_ever(path, started):
    """New runs, each with its own key, save over each other."""
    torch.set_num_threads(1)
    while True:
        run = build()
        for _ in range(3):
            train(run, 1)
            save(run, path)
            started.set()


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
