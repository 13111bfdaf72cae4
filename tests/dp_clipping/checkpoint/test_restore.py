"""Refuses what cannot be gone on from and what was damaged, and changes nothing."""

import os
import pickle
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
from opacus.schedulers import ExponentialNoise, StepGradClip
from torch import nn

from dp_clipping.checkpoint.file_format import SEAL_BYTES, key_path, write_sealed
from dp_clipping.checkpoint.run import agree
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.keys import Keys, fresh_keys
from tests.support import engine
from tests.support.saved_runs import (
    BATCH,
    Network,
    adamw,
    build,
    data,
    edit,
    keys_of,
    load,
    save,
    saved,
    train,
    trained,
)

pytestmark = pytest.mark.filterwarnings("error")


def frozen(value):
    """A copy that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): frozen(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(entry) for entry in value]
    return value


def everything(run, *schedulers):
    """All that a load may change."""
    account, optimizer = run.engine._account, run.optimizer
    own = run.engine._runs[0]
    adaptive, state = optimizer.adaptive_threshold, run.model.step_state
    return [
        frozen(x)
        for x in (
            run.model.state_dict(), [p.grad for p in run.model.parameters()],
            optimizer.state_dict(), optimizer.noise_multiplier, optimizer.max_grad_norm,
            optimizer.steps, optimizer.noise.key, state.batch_number, state.phase,
            adaptive and adaptive.state_dict(), vars(state.usage),
            run.loader.state_dict(), run.loader.batch_sampler._key, run.loader.batch_sampler.epoch,
            own.keys.master, own.start, list(account.history), account._parts, account._released,
            account._loaded_for is None,
            [{k: v for k, v in vars(s).items() if k != "optimizer"} for s in schedulers],
            torch.get_rng_state(),
        )
    ]  # fmt: skip


def refused(run, path, match, *schedulers, **more):
    before = everything(run, *schedulers)
    with pytest.raises((ValueError, FileNotFoundError), match=match) as caught:
        load(run, path, **more)
    assert "\n" not in str(caught.value)
    assert everything(run, *schedulers) == before


@pytest.fixture
def pair(path):
    """A checkpoint of three steps, and a run of one."""
    one = saved(path, 3, make=adamw)
    run = trained(1, make=adamw, seed=4)
    return one, run


class TestDamage:
    """Bits that are not those that were written are in `properties/test_damage.py`."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda saved: saved["dp_clipping"].update(steps=1),
            lambda saved: saved["privacy_accountant_state_dict"].update(history=[(8.0, 1 / 6, 3)]),
            lambda saved: saved["dp_clipping"]["sampler"].update(position=0),
            lambda saved: saved["module_state_dict"]["first.weight"].zero_(),
        ],
    )
    def test_edited(self, path, pair, change):
        """Saved again as a checkpoint, with the old digest, and with one of another key."""
        one, run = pair
        seal = path.read_bytes()[-SEAL_BYTES:]
        content = torch.load(path)
        change(content)
        torch.save(content, path)
        refused(run, path, "is not a whole checkpoint: it has no digest")
        path.write_bytes(path.read_bytes() + seal)
        refused(run, path, "does not agree with its digest")
        write_sealed(path, content, fresh_keys(None, torch.device("cpu")), {})
        for new_keys in (False, True):
            refused(run, path, "was changed after saving, by somebody", new_keys=new_keys)
        write_sealed(path, content, keys_of(one), {})
        with pytest.warns(UserWarning, match="account keeps"):
            load(run, path)

    def test_files_of_another_run(self, path, pair):
        _, run = pair
        other = path.with_name("other.pt")
        save(build(make=adamw), other)
        for file, match in ((path, "holds no key"), (key_path(path), "holds no key")):
            content = file.read_bytes()
            shutil.copy(other if file == path else key_path(other), file)
            refused(run, path, match)
            file.write_bytes(content)
        key_path(path).unlink()
        refused(run, path, "is missing")
        path.unlink()
        refused(run, path, "there is no checkpoint")

    def test_without_its_key_the_digest_alone_is_verified(self, path, pair):
        _, run = pair
        content = path.read_bytes()
        key_path(path).unlink()
        path.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
        refused(run, path, "does not agree with its digest", new_keys=True)
        path.write_bytes(content)
        with pytest.warns(UserWarning, match="account keeps 1"):
            load(run, path, new_keys=True)
        assert run.optimizer.steps == 3

    @pytest.mark.parametrize("options", [{"_use_new_zipfile_serialization": False}, {}])
    def test_other_formats_of_torch(self, path, options):
        one = trained(1)
        save(one, path, torch_save_kwargs=options)
        run = build()
        load(run, path, torch_load_kwargs={} if options else {"mmap": True})
        assert everything(run)[0] == everything(one)[0]
        assert torch.load(path)["dp_clipping"]["steps"] == 1, "for other programs too"

    @pytest.mark.parametrize("options", [{"pickle_protocol": 4}, {"protocol": 2}], ids=str)
    def test_a_format_that_no_load_reads_is_not_written(self, path, options):
        with (
            warnings.catch_warnings(action="ignore"),  # of torch, of the protocol
            pytest.raises(ValueError, match=r"torch_save_kwargs=.* leave them out"),
        ):
            save(trained(1), path, torch_save_kwargs=options)
        assert not path.exists()


def with_scale(scale: torch.Tensor):
    run = build()
    run.model.network.scale = scale
    return run


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)


def of_another_network():
    return engine.build(module=nn.Linear(3, 2), dataset=data(), noise_multiplier=0.8)


BUFFER = r"entry scale is \[\] torch.float32 in the checkpoint and"
OTHERS = {
    r"first.weight is \[5, 3\] in the checkpoint and \[6, 3\] in this": lambda: build(hidden=6),
    "optimizer is SGD in the checkpoint and AdamW": lambda: build(make=adamw),
    "accountant is rdp in the checkpoint and prv": lambda: build(accountant="prv"),
    "private is True in the checkpoint and False": lambda: build(grad_sample_mode="no_dp"),
    "first.weight is .* in the checkpoint and missing in this model": of_another_network,
    rf"{BUFFER} \[2\] torch.float32 in this model": lambda: with_scale(torch.ones(2)),
    rf"{BUFFER} \[\] torch.float64 in this model": lambda: with_scale(torch.tensor(1.0).double()),
    r"groups is \[4\] .* and \[1, 3\]": lambda: build(make=two_groups),
}


@pytest.mark.parametrize("match", OTHERS)
def test_another_run(path, match):
    saved(path, 1)
    refused(OTHERS[match](), path, match)


@pytest.mark.parametrize("content", [b"garbage" * 99, pickle.dumps({"a": print}, 2), b"\x80\x02."])
def test_garbage(path, content):
    path.write_bytes(content)
    refused(build(), path, "is not a whole checkpoint")


def test_code_is_not_executed(path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(path) + ".trap",))

    write_sealed(path, {"module_state_dict": Trap()}, Keys(bytes(32)), {})
    refused(build(), path, "UnpicklingError: Weights only load failed")
    refused(build(), path, "would execute code", torch_load_kwargs={"weights_only": False})
    assert not os.path.exists(str(path) + ".trap")


def test_files_and_arguments_of_others(path):
    run = build()
    torch.save({"module_state_dict": {}}, path)
    refused(run, path, "or written by another program than save_checkpoint")
    save(run, path)
    edit(run, path, lambda saved: saved["dp_clipping"].update(version=3))
    refused(run, path, "has version 3, this program reads 2")
    save(run, path)
    edit(run, path, lambda saved: saved["dp_clipping"].pop("steps"))
    refused(run, path, "KeyError: 'steps'")
    save(run, path, noise_scheduler=ExponentialNoise(run.optimizer, gamma=0.9))
    scheduler = StepGradClip(run.optimizer, step_size=2, gamma=0.5)
    refused(run, path, "state of the noise_scheduler", scheduler, noise_scheduler=scheduler)
    save(run, path)
    refused(run, path, "assign=True", module_load_dict_kwargs={"assign": True})


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"best": object()}, "best holds something that cannot be loaded"),
        ({"loss": nn.Linear(1, 1)}, "loss holds something"),
        ({"f": lambda: 0}, "f holds something"),
        ({"module_state_dict": 1}, "module_state_dict, which are written here"),
    ],
)
def test_saving_what_could_not_be_loaded(path, entry, match):
    run = saved(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=match):
        save(run, path, checkpoint_dict=entry)
    assert path.read_bytes() == before


class Stop(Exception):
    pass


class TestUndone:
    """A load that fails in its middle."""

    def build(self):
        threshold = AdaptiveThreshold(0.7, expected_batch_size=BATCH, count_std=4.0)
        run = build(make=adamw, adaptive_threshold=threshold)
        return run, ExponentialNoise(run.optimizer, gamma=0.9)

    @pytest.mark.parametrize("at", ["accountant", "module", "optimizer", "scheduler", "loader"])
    def test_everything_is_as_it_was(self, path, monkeypatch, at):
        run, scheduler = self.build()
        train(run, 2, after=scheduler.step)
        save(run, path, noise_scheduler=scheduler)
        train(run, 2, after=scheduler.step)
        next(iter(run.loader))  # a draw in the hand
        objects = {
            "accountant": run.engine.accountant, "module": run.model.network,
            "optimizer": run.optimizer.original_optimizer, "scheduler": scheduler,
            "loader": run.loader,
        }  # fmt: skip
        original = objects[at].load_state_dict

        def fails(*args, **kwargs):
            original(*args, **kwargs)
            raise Stop("in the\nmiddle")

        with monkeypatch.context() as patch:
            patch.setattr(type(objects[at]), "load_state_dict", lambda _, *a, **k: fails(*a, **k))
            match = r"run.pt cannot be loaded .*Stop: in the middle\); nothing was changed"
            refused(run, path, match, scheduler, noise_scheduler=scheduler)
        with pytest.warns(UserWarning, match="account keeps 2"):
            load(run, path, noise_scheduler=scheduler)
        assert run.optimizer.steps == 2

    def test_another_shape_without_strict(self, path):
        """torch copies the entries that fit before it refuses the others."""
        save(build(), path)
        other = build()
        other.model.network.scale = torch.ones(2)
        refused(
            other,
            path,
            "size mismatch for scale.* nothing was changed",
            module_load_dict_kwargs={"strict": False},
        )

    def test_state_of_the_users_that_is_no_tensor(self, path, monkeypatch):
        monkeypatch.setattr(Network, "get_extra_state", lambda s: s.note, raising=False)
        put = lambda s, note: setattr(s, "note", note)  # noqa: E731
        monkeypatch.setattr(Network, "set_extra_state", put, raising=False)
        monkeypatch.setattr(Network, "note", {"of": "the class"}, raising=False)
        run = build()
        run.model.network.note = {"of": "the save"}
        save(run, path)
        run.model.network.note = {"of": "now"}
        with monkeypatch.context() as patch:
            patch.setattr(type(run.loader), "load_state_dict", lambda *_: 1 / 0)
            refused(run, path, "ZeroDivisionError")
        assert run.model.network.note == {"of": "now"}
        load(run, path)
        assert run.model.network.note == {"of": "the save"}


def test_a_rank_that_does_not_come_is_told_of(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Timed out waiting 5000ms")

    run = SimpleNamespace(group=object(), world_size=2, device=torch.device("cpu"))
    monkeypatch.setattr("dp_clipping.checkpoint.run.gathered", fails)
    with pytest.raises(RuntimeError, match=r"on every rank, between the same two steps.*5000ms"):
        agree(run, "load it", None)
