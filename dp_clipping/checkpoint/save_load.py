"""Saves and loads checkpoints: a run continues as if uninterrupted, and the file has no secret.

Two files. `PATH` holds the model, the optimizer, the accountant's history, the number of
Poisson batches, of steps, and the public settings of the run. `PATH.key` (mode 0600) holds the key
that noise and sampling come from. Anyone who has both files can subtract the noise.

A save replaces files in an order in which a kill at any moment leaves a checkpoint with its key:

    1  the key file gets this run's key beside the ones it has (mostly it has it already)
    2  the checkpoint takes the place of the old one
    3  keys that no longer belong to the checkpoint are removed

A checkpoint names its key by a fingerprint, so a load finds its line, or sees that none is there.

When does a load continue with the saved key? The same key gives the same noise, and two different
sums under the same noise give away their difference. So:

| differs from the saved run | what a load does |
| --- | --- |
| nothing; mode; sharded or not | saved key: the same batches, noise and sums (to rounding) |
| σ, C, clipping, expected batch size, length of the data | new key, with a warning |
| number of ranks (all, or those with other samples), CPU or GPU | new key, with a warning |
| a scheduler, or the optimizer's state, is missing in one of the two | new key, with a warning |
| the key file is missing | ValueError; new key if asked for |
| parameters, optimizer's class, accountant | ValueError |

Ranks and devices are listed because of dropout: each rank has its own random state of torch, and
other masks give another sum.

Other differences cannot be seen here (data of the same length, the learning rate, the code; with
dropout, the size of microbatches and the GPU's model), and are the user's job: of two different
continuations of one checkpoint publish one, or give the second `new_keys=True`. If two are
published, their privacy losses compose, and neither account has the other's steps, unless both were
made in one engine: a load keeps the steps that its engine has counted beyond the checkpoint, and a
step that is made again from the saved key with another σ, C, learning rate or criterion, or of
another batch, is refused (see ledger.py). Of two runs of an engine only the one that was loaded
last goes on with a key.

Both are tied together and verified as a whole: `PATH` ends with the SHA-256 of its content and an
HMAC of that digest under a key derived from the run's (file_format.py). What does not agree is
refused, on every rank, before anything is changed, and a load that fails later is undone
(restore.py). With `new_keys=True` the key file may be missing: then the digest alone is verified.

A sharded model is saved as a folder: see distributed_format.py. A load takes either, whatever the
model that it is for.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from typing import Any

from torch import Tensor

from dp_clipping.checkpoint.compatibility import check_fits
from dp_clipping.checkpoint.file_format import (
    ACCOUNTANT,
    DETAILS,
    DIGEST,
    MODULE,
    OPTIMIZER,
    VERSION,
    check_contents,
    check_places,
    plain,
    read,
    scheduler_state,
    write,
)
from dp_clipping.checkpoint.random_states import states_of
from dp_clipping.checkpoint.restore import (
    LEFT_BY_SCHEDULERS,
    Resume,
    check_load,
    check_save,
    go_on,
    refusal,
)
from dp_clipping.checkpoint.run import (
    PrivateRun,
    Snapshot,
    agree,
    of_all_ranks,
    together,
)
from dp_clipping.checkpoint.tensors import (
    State,
    by_name,
    by_number,
    check_groups,
    check_part,
    is_sharded,
    lay_out,
    room_for,
    take_tensors,
    with_tensors,
)
from dp_clipping.checkpoint.weights import LEFT_OUT, complete, split


def save(snapshot: Snapshot, extra: Mapping[str, Any]) -> None:
    """Writes a checkpoint, one file by rank 0 or a folder by all, with the entries `extra`.

    Every rank calls it. See `PrivacyEngine.save_checkpoint`.
    """
    check_save(snapshot.run)
    if is_sharded(snapshot.run):
        if snapshot.weights != "all":
            raise ValueError(
                f"weights={snapshot.weights!r} is for a model that is not sharded: leave it out"
            )
        _save_folder(snapshot, extra)
    else:
        _save_file(snapshot, extra)


def _save_file(snapshot: Snapshot, extra: Mapping[str, Any]) -> None:
    run, path = snapshot.run, snapshot.path
    random = of_all_ranks(run, states_of(run.device))  # not of a generator of the user's own
    # Every rank asks for it: where each steps a part of the parameters, it is a collective call.
    state = run.optimizer.original_optimizer.state_dict() if snapshot.with_optimizer else {}

    def write_all() -> None:
        if run.rank == 0:
            check_places(path, snapshot.key_file)
            contents = _contents(snapshot, extra, random, lambda: state)
            check_contents(contents, extra, snapshot.torch_kwargs)
            write(path, contents, run.keys, snapshot.torch_kwargs, snapshot.key_file)

    with run.model.whole_parameters():
        together(run, f"write {path}", write_all)


def _save_folder(snapshot: Snapshot, extra: Mapping[str, Any]) -> None:
    from dp_clipping.checkpoint import distributed_format as folder_format  # takes a second

    run, path = snapshot.run, snapshot.path
    random = of_all_ranks(run, states_of(run.device))  # not of a generator of the user's own
    name = folder_format.new_name(run)

    def prepare() -> tuple[State, dict[str, Tensor]]:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, and a sharded model needs a folder: rename one")
        if run.rank == 0:
            check_places(path, snapshot.key_file, is_folder=True)
        contents = _contents(snapshot, extra, random, partial(by_name, run))
        contents[DETAILS][folder_format.TENSORS] = name
        tensors = take_tensors(contents)
        for key, x in tensors.items():
            check_part(run, key, x)
        check_contents(contents, extra, snapshot.torch_kwargs)
        return contents, tensors

    def write_run() -> None:
        if run.rank == 0:
            folder_format.write_run(snapshot, contents)

    contents, tensors = together(run, f"save {path}", prepare)
    write_part = partial(folder_format.write_part, run, path / name, tensors)
    digests = together(run, f"write its part of {path}", write_part)
    contents[DETAILS][folder_format.FILES] = dict(ChainMap(*of_all_ranks(run, digests)))
    together(run, f"write {path}", write_run)


def _contents(
    snapshot: Snapshot,
    extra: Mapping[str, Any],
    random: list[dict[str, Tensor]],
    optimizer_state: Callable[[], State],
) -> State:
    """Returns the entries of a checkpoint, `extra` ones of the user's among them."""
    run = snapshot.run
    contents = {
        **extra,
        MODULE: run.model.network.state_dict(**snapshot.module_kwargs),
        ACCOUNTANT: plain(run.account.accountant.state_dict()),
        DETAILS: _details(run, random),
    }
    if snapshot.weights != "all":
        contents[MODULE], contents[DETAILS][LEFT_OUT] = split(
            run.model.network, contents[MODULE], snapshot.weights
        )
    if snapshot.with_optimizer:
        contents[OPTIMIZER] = optimizer_state()
    for entry, scheduler in snapshot.schedulers.items():
        contents[entry] = scheduler_state(scheduler)
    return contents


def _details(run: PrivateRun, random: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Returns the entry that Opacus does not have."""
    adaptive, covered = run.optimizer.adaptive_threshold, run.account.certificate
    return {
        "version": VERSION,
        "run": run.describe(),
        "key_fingerprint": run.keys.fingerprint,
        "account": plain(run.account.parts()),
        "steps": run.optimizer.steps,
        "sampler": None if run.poisson is None else run.poisson.state_dict(),
        "start": list(run.start),
        # Of all steps of the account, as all of them are in the file.
        "other_batches": run.account.other_batches,
        "certificate": covered and list(astuple(covered)),
        # Which examples are together, said to nobody who has not the key.
        "units": run.units_digest and run.keys.mac(run.units_digest),
        # As schedulers have left them; in "run" are the ones that make_private was given.
        **{name: plain(getattr(run.optimizer, name)) for name in LEFT_BY_SCHEDULERS},
        "adaptive_threshold": None if adaptive is None else adaptive.state_dict(),
        "random": random,
    }


def load(snapshot: Snapshot, new_keys: bool) -> dict[str, Any]:
    """Loads a checkpoint: every rank reads and checks it, and only then changes the run.

    A file or a folder, on any number of ranks, sharded or not: each rank takes its parts of the
    tensors. See `PrivacyEngine.load_checkpoint`.
    """
    run, path = snapshot.run, snapshot.path
    with run.model.whole_parameters():
        resume, fill, problem = None, None, None
        try:
            check_load(snapshot)
            if path.is_dir():
                resume, fill = _read_folder(snapshot, new_keys)
            else:
                resume = _read_file(snapshot, new_keys)
        except (ValueError, RuntimeError, OSError) as error:
            problem = error
        except Exception as error:
            problem = refusal(path, error)
        content = resume and (resume.details[DIGEST], resume.keys is None)
        agree(run, f"load {path}", problem, content, kind=ValueError)
        assert resume is not None
        if fill is not None:
            together(run, f"load {path}", fill)
        return go_on(snapshot, resume)


def _read_file(snapshot: Snapshot, new_keys: bool) -> Resume:
    saved = read(snapshot.path, snapshot.torch_kwargs, snapshot.key_file)
    if LEFT_OUT in saved[DETAILS] and is_sharded(snapshot.run):
        raise ValueError(
            f"{snapshot.path} was saved without all weights, and the model is sharded: save it "
            'with weights="all"'
        )
    complete(snapshot.run.model.network, saved, snapshot.path)
    keys, unsaved, notes = check_fits(snapshot, saved, new_keys)
    return Resume(lay_out(snapshot.run, saved), keys, unsaved, notes)


def _read_folder(snapshot: Snapshot, new_keys: bool) -> tuple[Resume, Callable[[], None]]:
    """Returns the entries without tensors, and a function of all ranks that reads the tensors."""
    from dp_clipping.checkpoint import distributed_format as folder_format  # takes a second

    run, path = snapshot.run, snapshot.path
    saved = read(path / folder_format.RUN_FILE, snapshot.torch_kwargs, snapshot.key_file)
    folder_format.verify(run, path, saved)
    reader, known = folder_format.read_shapes(path, saved)
    keys, unsaved, notes = check_fits(snapshot, with_tensors(saved, known), new_keys)
    check_groups(run, saved, path)
    if not snapshot.with_optimizer:
        saved.pop(OPTIMIZER, None)
    tensors = room_for(run, saved, known)

    def fill() -> None:
        with folder_format.reading(path):
            folder_format.read_tensors(run, reader, tensors)
            saved.update(with_tensors(saved, tensors))
            if OPTIMIZER in saved:
                saved[OPTIMIZER] = by_number(run, saved[OPTIMIZER])

    return Resume(saved, keys, unsaved, notes), fill
