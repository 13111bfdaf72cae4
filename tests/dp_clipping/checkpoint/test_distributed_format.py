"""A run on shards goes on as if it had never stopped, also on another number of ranks."""

import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.checkpoint import distributed_format as checkpoint_sharded
from dp_clipping.checkpoint import file_format
from dp_clipping.checkpoint import tensors as checkpoint_tensors
from dp_clipping.checkpoint.file_format import digest_of, key_path, write_sealed
from dp_clipping.noise.keys import read_keys
from tests.support import engine, zoo
from tests.support.on_ranks import on_ranks
from tests.support.ranks import fsdp1, fsdp2
from tests.support.replicas import build, train
from tests.support.saved_runs import load, save
from tests.support.sharded_steps import whole

BEFORE, AFTER = 3, 3  # steps


def start(context: Context, **options):
    """A run on FSDP2."""
    return build(context, name="transformer", shard=partial(fsdp2, context), **options)


def values(run) -> list[torch.Tensor]:
    """Parameters and momenta, all of each."""
    found = list(run.model.network.state_dict().values())
    for state in run.optimizer.state.values():
        found += [x for _, x in sorted(state.items()) if isinstance(x, torch.Tensor)]
    return [whole(x).detach().clone() for x in found]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved_and_trained(context: Context, path: Path) -> tuple:
    """Saves in the middle, and goes on."""
    run = start(context, seed=None)
    train(run, BEFORE)
    save(run, path, checkpoint_dict={"note": "of the user"})
    at_save = values(run)
    return at_save, train(run, AFTER), values(run), list(run.engine.accountant.history)


def resumed(context: Context, path: Path) -> tuple:
    run = start(context, seed=None)
    torch.manual_seed(5)
    back = load(run, path)
    assert back["note"] == "of the user"
    assert run.optimizer.steps == BEFORE
    at_load = values(run)
    return at_load, train(run, AFTER), values(run), list(run.engine.accountant.history)


def with_new_keys(context: Context, path: Path) -> tuple:
    run = start(context, seed=None)
    with pytest.warns(UserWarning, match="(world_size|data_ranks) was .* a new key"):
        load(run, path)
    keys = run.engine._runs[0].keys
    assert keys not in read_keys(key_path(path))
    assert run.optimizer.steps == BEFORE
    return values(run), list(run.engine.accountant.history), keys.fingerprint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def test_a_run_goes_on(cpu_ranks, path):
    """With drawn keys, from the key file: bit for bit, or with new ones on fewer ranks.

    Other layouts and fixed keys are in `ranks/test_runs.py`.
    """
    expected = cpu_ranks.run(4, saved_and_trained, path)
    for one, other in zip(expected, cpu_ranks.run(4, resumed, path), strict=True):
        assert same(one[0], other[0])
        assert one[1] == other[1]
        assert same(one[2], other[2])
        assert one[3] == other[3]
    assert os.stat(key_path(path)).st_mode & 0o777 == 0o600
    assert sorted(p.name.split("-")[0] for p in path.iterdir()) == ["run.pt", "tensors"]
    (folder,) = path.glob("tensors-*")
    assert len(list(folder.glob("*.distcp"))) == 4
    (key,) = read_keys(key_path(path))
    for file in path.rglob("*"):
        content = b"" if file.is_dir() else file.read_bytes()
        assert key.master not in content
        assert key.noise not in content
    fewer = cpu_ranks.run(2, with_new_keys, path)
    assert all(same(of_rank[0], expected[0][0]) for of_rank in fewer)
    assert {sum(steps for _, _, steps in of_rank[1]) for of_rank in fewer} == {BEFORE}
    assert len({of_rank[2] for of_rank in fewer}) == 1


@on_ranks(2)
def test_an_optimizer_without_a_state(context: Context, path: Path) -> None:
    """torch's own `get_optimizer_state_dict` would make a step to have one."""
    run = start(context, seed=None)
    save(run, path)
    expected = train(run, 2), values(run)
    again = start(context, seed=None)
    load(again, path)
    assert not again.optimizer.state
    assert train(again, 2) == expected[0]
    assert same(values(again), expected[1])


def refused(context: Context, path: Path, options) -> str:
    """On all ranks, on some because of another."""
    run = start(context, **options)
    before, steps, key = values(run), run.optimizer.steps, run.engine._runs[0].keys
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load(run, path)
    assert same(values(run), before)
    assert (run.optimizer.steps, run.engine._runs[0].keys) == (steps, key)
    train(run, 1)
    return str(caught.value)


def refused_on_all(cpu_ranks, path: Path, match: str, **options) -> None:
    said = cpu_ranks.run(2, refused, path, options)
    own = [message for message in said if "its own error says why" not in message]
    assert own
    assert all(re.search(match, message) for message in own), own


def saved(context: Context, path: Path, seed: int | None = 5) -> None:
    run = start(context, seed=seed)
    train(run, 1)
    save(run, path)


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def change(what: str, path: Path) -> None:
    (folder,) = path.glob("tensors-*")
    if what == "description":
        cut(folder / ".metadata")
    elif what == "tensors":
        cut(folder / "__1_0.distcp")
    elif what == "a rank's file":
        (folder / "__1_0.distcp").unlink()
    elif what == "folder":
        shutil.rmtree(folder)
    elif what == "run":
        cut(path / "run.pt")
    elif what == "key":
        key_path(path).unlink()
    elif what == "code":
        (folder / ".metadata").write_bytes(pickle.dumps(Planted(path.parent / "executed")))
        (keys,), file = read_keys(key_path(path)), path / "run.pt"
        whole = torch.load(file)
        whole["dp_clipping"]["files"][".metadata"] = digest_of(folder / ".metadata")
        write_sealed(file, whole, keys, {})
    elif what.startswith("bit of "):
        file = next(path.rglob(what.removeprefix("bit of ")))
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 16
        file.write_bytes(content)


class Planted:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


BROKEN = {
    "description": r"tensors-.*/.metadata does not agree with its digest",
    "tensors": "__1_0.distcp does not agree with its digest",
    "a rank's file": "__1_0.distcp is missing",
    "folder": "is not a whole checkpoint: .* is missing",
    "bit of run.pt": "does not agree with its digest",
    "bit of .metadata": "does not agree with its digest",
    "bit of __0_0.distcp": "__0_0.distcp does not agree with its digest",
    "bit of __1_0.distcp": "__1_0.distcp does not agree with its digest",
    "run": "is not a whole checkpoint",
    "key": "is missing",
    "code": "is not a whole checkpoint",
    "files swapped": "does not agree with its digest",
    "run of another": "is not a whole checkpoint: tensors-.* is missing",
}


def test_broken_checkpoints(cpu_ranks, path):
    other = path.with_name("other")
    for each in (path, other):
        cpu_ranks.run(2, saved, each)
    for what, match in BROKEN.items():
        copy = path.with_name(f"without {what}")
        shutil.copytree(path, copy)
        shutil.copy(key_path(path), key_path(copy))
        if what == "files swapped":
            shutil.copy(next(copy.rglob("__1_0.distcp")), next(copy.rglob("__0_0.distcp")))
        elif what == "run of another":
            shutil.copy(other / "run.pt", copy / "run.pt")
            shutil.copy(key_path(other), key_path(copy))
        else:
            change(what, copy)
        refused_on_all(cpu_ranks, copy, match)
    assert not (path.parent / "executed").exists()


def fails_on_one_rank(context: Context, path: Path) -> None:
    """In its middle, on replaced parts of parameters: they are put back on all ranks."""
    run = start(context)
    train(run, 2)
    before, count = values(run), list(run.engine.accountant.history)
    original = type(run.loader).load_state_dict
    if context.rank == 1:
        type(run.loader).load_state_dict = lambda *_: 1 / 0
    try:
        with pytest.raises((ValueError, RuntimeError), match=r"could not load|ZeroDivisionError"):
            load(run, path)
    finally:
        type(run.loader).load_state_dict = original
    assert same(values(run), before)
    assert (run.optimizer.steps, list(run.engine.accountant.history)) == (2, count)
    train(run, 1)


def test_a_load_that_fails(cpu_ranks, path):
    cpu_ranks.run(2, saved, path)
    cpu_ranks.run(2, fails_on_one_rank, path)


def test_other_runs(cpu_ranks, path):
    cpu_ranks.run(2, saved, path)
    match = r"float32 in the checkpoint and .*float64"
    refused_on_all(cpu_ranks, path, match, dtype=torch.float64)


@pytest.mark.parametrize("at", ["save", "load"])
@on_ranks(2)
def test_parts_that_torch_believes_elsewhere(context: Context, path: Path, at: str) -> None:
    """Were torch to believe a part elsewhere."""
    run = start(context)
    if at == "load":
        save(run, path)
    where = checkpoint_tensors.box_of
    checkpoint_tensors.box_of = lambda x: tuple((start + 1, n) for start, n in where(x))
    try:
        with pytest.raises(ValueError, match="is cut unevenly by several axes"):
            (save if at == "save" else load)(run, path)
    finally:
        checkpoint_tensors.box_of = where
    assert path.exists() == (at == "load")


def without_groups(context: Context, path: Path) -> None:
    run = start(context, grad_sample_mode="no_dp")
    with pytest.raises(ValueError, match="'no_dp' has no checkpoints of sharded models"):
        save(run, path)


def test_ranks_that_know_nothing_of_each_other(cpu_ranks, path):
    cpu_ranks.run(2, without_groups, path)
    assert not path.exists()


def on_fsdp1(context: Context, path: Path) -> None:
    shard = partial(fsdp1, context)
    run = build(context, name="transformer", shard=shard, grad_sample_mode="no_dp")
    for action in (save, load):
        with pytest.raises(ValueError, match=r"\(FSDP1\) are not supported: .*fully_shard"):
            action(run, path)


def test_fsdp1_is_refused(cpu_ranks, path):
    cpu_ranks.run(2, on_fsdp1, path)
    assert not path.exists()


def adamw(context: Context, groups: int):
    """Its state has a count of steps beside two moments; with two groups, of other settings."""
    case = zoo.BY_NAME["transformer"]
    network = fsdp2(context, case.build())
    some = list(network.parameters())
    given = some if groups == 1 else [{"params": some[:3]}, {"params": some[3:], "lr": 0.02}]
    run = engine.build(
        module=network, optimizer=torch.optim.AdamW(given, lr=0.01), batch_size=4,
        criterion=zoo.Criterion(case.per_sample_loss), noise_multiplier=0.8, max_grad_norm=0.7,
        dataset=TensorDataset(*case.batch(24), torch.arange(24)),
    )  # fmt: skip
    run.device = context.device
    return run


def with_adamw(context: Context, path: Path, groups: int) -> list[torch.Tensor]:
    run = adamw(context, groups)
    if context.world_size == 4:
        train(run, 2)
        save(run, path)
    else:
        load(run, path)
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {2.0}
    saved = values(run)
    train(run, 1)
    return saved


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_adamw(cpu_ranks, path, groups):
    expected = cpu_ranks.run(4, with_adamw, path, groups)
    for found in cpu_ranks.run(2, with_adamw, path, groups):
        assert same(found, expected[0])


@on_ranks(2)
def test_other_groups(context: Context, path: Path) -> None:
    save(adamw(context, 2), path)
    run = adamw(context, 2)
    first, second = run.optimizer.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]
    with pytest.raises(ValueError, match=r"group 0 of the optimizer holds .* in only one"):
        load(run, path)


@on_ranks(2)
def test_a_rank_that_cannot_write(context: Context, path: Path) -> None:
    run = start(context)
    train(run, 1)
    writer = checkpoint_sharded.dcp.FileSystemWriter

    class Full(writer):
        def write_data(self, *args, **kwargs):
            raise OSError("no space left")

    if context.rank == 1:
        checkpoint_sharded.dcp.FileSystemWriter = Full
    try:
        with pytest.raises(
            RuntimeError, match=r"could not be written: OSError.*no space left.* on rank 1"
        ):
            save(run, path)
    finally:
        checkpoint_sharded.dcp.FileSystemWriter = writer
    assert not (path / "run.pt").exists()
    save(run, path)
    assert len(list(path.glob("tensors-*"))) == 1


class Stop(Exception):
    """In place of a kill, of which the other ranks would hear by a timeout only."""


def stopped_in_between(context: Context, path: Path, at: str, call: int) -> None:
    """Over the checkpoint of another run, with another key."""
    run = start(context, seed=None)
    train(run, 2)
    module = checkpoint_sharded if at == "digest_of" else file_format
    original = getattr(module, at)
    calls = []

    def stops(*args, **options):
        calls.append(args)
        if len(calls) == call:
            raise Stop
        return original(*args, **options)

    if context.rank == 0 or at == "digest_of":
        setattr(module, at, stops)
    try:
        with pytest.raises((Stop, RuntimeError)):
            save(run, path)
    finally:
        setattr(module, at, original)


def found_again(context: Context, path: Path, steps: int) -> None:
    run = start(context, seed=None)
    load(run, path)
    assert run.optimizer.steps == steps
    train(run, 1)
    save(run, path)
    assert read_keys(key_path(path)) == [run.engine._runs[0].keys]
    assert len(list(path.glob("tensors-*"))) == 1


@pytest.mark.parametrize(
    ("at", "call", "steps"),
    [
        *(pytest.param(at, 1, 1, marks=pytest.mark.slow) for at in ("digest_of", "write_keys")),
        ("write_sealed", 1, 1),
        ("write_keys", 2, 2),
    ],
)
def test_stopped_in_between(cpu_ranks, path, at, call, steps):
    """The old checkpoint is there with its key, or the new one; what is left over goes away."""
    cpu_ranks.run(2, saved, path, None)
    cpu_ranks.run(2, stopped_in_between, path, at, call)
    cpu_ranks.run(2, found_again, path, steps)


def over_a_file(context: Context, path: Path) -> None:
    run = start(context)
    with pytest.raises((ValueError, RuntimeError), match=r"is a file|its own error says why"):
        save(run, path)
    with pytest.raises((ValueError, RuntimeError), match=r"is a folder|its own error says why"):
        save(run, path.with_name("new"), key_path=path.parent)
    missing = path.with_name("missing")
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"there is no folder|its own err"):
        save(run, path.with_name("new"), key_path=missing / "own.key")
    assert not path.with_name("new").exists()
    x, y, _ = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    with pytest.raises(RuntimeError, match="middle of a step"):
        save(run, path)


def test_refused_saves(cpu_ranks, path):
    path.write_text("something else")
    cpu_ranks.run(2, over_a_file, path)
    assert path.read_text() == "something else"
