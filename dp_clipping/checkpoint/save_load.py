"""Checkpoints: a run goes on as if it had never stopped, and nothing secret is in the file.

Two files. `PATH` holds the model, the optimizer, the accountant's history, the position in the
draws, the number of steps and the public settings of the run. `PATH.key` (mode 0600) holds the key
that noise and sampling are drawn from: who has both files can subtract the noise.

A save replaces files in an order in which a kill at any moment leaves a checkpoint with its key:

    1  the key file gets this run's key beside the ones it has (mostly it has it already)
    2  the checkpoint takes the place of the old one
    3  keys that no longer belong to the checkpoint are removed

A checkpoint names its key by a fingerprint, so a load finds its line, or sees that none is there.

When does a load go on with the saved key? The same key draws the same noise, and two different
sums under the same noise give away their difference. So:

| differs from the saved run | what a load does |
| --- | --- |
| nothing; mode; sharded or not | saved key: the same draws, noise and sums (to rounding) |
| σ, C, clipping, expected batch size | new key, with a warning |
| number of ranks (all, or those with other samples), CPU or GPU | new key, with a warning |
| a scheduler, or the optimizer's state, is missing in one of the two | new key, with a warning |
| data (length or sample rate), or the key file is missing | ValueError; new key if asked for |
| parameters, optimizer's class, accountant | ValueError |

Ranks and devices are in it because of dropout: torch's random state is each rank's own, and other
masks make another sum.

What cannot be seen here (data of the same length, the learning rate, the code, with dropout the
size of microbatches and the GPU's model) is the user's: of two different continuations of one
checkpoint publish one, or give the second `new_keys=True`. Two that are published compose, and the
account of neither has the steps of the other, unless both were made in one engine: a load keeps
what its engine has counted beyond the checkpoint, and a step that is made again from the saved key
with another σ or C, or of another draw, is refused (see ledger.py).

Both are tied together and verified as a whole: `PATH` ends with the SHA-256 of its content and an
HMAC of that digest under a key derived from the run's (file_format.py). What does not agree is
refused, on every rank, before anything is changed, and a load that fails later is undone
(restore.py). With `new_keys=True` the key file may be missing: then the digest alone is verified. A
checkpoint of version 1, which has no digest, loads with a warning.

A sharded model is saved as a folder: see distributed_format.py. A load takes either, whatever the
model that it is for.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dp_clipping.checkpoint import distributed_format as checkpoint_sharded
from dp_clipping.checkpoint.compatibility import check_fits
from dp_clipping.checkpoint.file_format import check_contents, read, write
from dp_clipping.checkpoint.restore import (
    Resume,
    Snapshot,
    as_refusal,
    check_load,
    check_save,
    go_on,
)
from dp_clipping.checkpoint.run import agree_on_content, agree_on_success, random_states
from dp_clipping.checkpoint.tensors import is_sharded, lay_out


def save(snapshot: Snapshot, extra: Mapping[str, Any]) -> None:
    """Write both files on rank 0; every rank returns when they are whole.

    `extra`: further entries of the user's.

    Raises:
        RuntimeError: in the middle of a step, or if rank 0 could not write.
        ValueError: if a load without executing code could not read what is to be saved.
    """
    run = snapshot.run
    check_save(run)
    if is_sharded(run):
        checkpoint_sharded.save(snapshot, extra)
        return
    random = random_states(run)
    problem = None
    if run.group is None or dist.get_rank(run.group) == 0:
        try:
            contents = snapshot.contents(extra, random, run.optimizer.state_dict)
            check_contents(contents, extra)
            write(snapshot.path, contents, run.keys, snapshot.torch_kwargs)
        except Exception as error:
            if run.group is None:
                raise
            problem = error
    agree_on_success(run, snapshot.path, problem)


def load(snapshot: Snapshot, new_keys: bool) -> dict[str, Any]:
    """Read and check on every rank, agree, and only then change anything.

    `new_keys`: noise and samples get a new key, whatever the saved one.

    Returns:
        The entries that are not read here, and those of module and accountant, as in Opacus.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it is cut short, of another run, or its key is missing; or another rank failed.
    """
    run, path = snapshot.run, snapshot.path
    if path.is_dir():
        return checkpoint_sharded.load(snapshot, new_keys)
    resume, problem = None, None
    try:
        check_load(snapshot)
        saved = read(path, snapshot.torch_kwargs)
        keys, kept, notes = check_fits(snapshot, saved, new_keys)
        resume = Resume(lay_out(run, saved), keys, kept, notes)
    except Exception as error:
        problem = as_refusal(path, error)
        if run.group is None:
            raise problem from problem.__cause__
    agree_on_content(run, path, resume and resume.digest(), problem)
    assert resume is not None
    return go_on(snapshot, resume)
