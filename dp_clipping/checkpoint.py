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
| nothing; mode; number of ranks | saved key: the same draws, noise and sums (to rounding) |
| σ, C, clipping, expected batch size | new key, with a warning |
| a scheduler, or the optimizer's state, is missing in one of the two | new key, with a warning |
| data (length or sample rate), or the key file is missing | ValueError; new key if asked for |
| parameters, optimizer's class, accountant | ValueError |

What cannot be seen here (data of the same length, the learning rate, the code) is the user's: of
two different continuations of one checkpoint publish one, or give the second `new_keys=True`.

A sharded model is saved as a folder: see checkpoint_sharded.py. A load takes either, whatever the
model that it is for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from opacus.accountants.accountant import IAccountant

from dp_clipping import checkpoint_sharded
from dp_clipping.checkpoint_file import OWN, check_contents, plain, read, scheduler_state, write
from dp_clipping.checkpoint_tensors import is_sharded, lay_out
from dp_clipping.fits import check_fits
from dp_clipping.resume import Resume, check_load, check_save, go_on, own_entry
from dp_clipping.run import Run, agree_on_content, agree_on_success, random_states


def save(
    run: Run,
    accountant: IAccountant,
    path: Path,
    *,
    with_optimizer: bool,
    schedulers: Mapping[str, Any],
    extra: Mapping[str, Any],
    module_kwargs: Mapping[str, Any],
    torch_kwargs: Mapping[str, Any],
) -> None:
    """Write both files on rank 0; every rank returns when they are whole.

    Raises:
        RuntimeError: in the middle of a step, or if rank 0 could not write.
        ValueError: if a load without executing code could not read what is to be saved.
    """
    check_save(run)
    if is_sharded(run):
        checkpoint_sharded.save(
            run, accountant, path, with_optimizer=with_optimizer, schedulers=schedulers,
            extra=extra, module_kwargs=module_kwargs, torch_kwargs=torch_kwargs,
        )  # fmt: skip
        return
    random = random_states(run)
    problem = None
    if run.group is None or dist.get_rank(run.group) == 0:
        try:
            contents = {
                **extra,
                "module_state_dict": run.model.network.state_dict(**module_kwargs),
                "privacy_accountant_state_dict": plain(accountant.state_dict()),
                OWN: own_entry(run, random),
            }
            if with_optimizer:
                contents["optimizer_state_dict"] = run.optimizer.state_dict()
            for name, scheduler in schedulers.items():
                contents[name] = scheduler_state(scheduler)
            check_contents(contents, extra)
            write(path, contents, run.keys, torch_kwargs)
        except Exception as error:
            if run.group is None:
                raise
            problem = error
    agree_on_success(run, path, problem)


def load(
    run: Run,
    accountant: IAccountant,
    path: Path,
    *,
    with_optimizer: bool,
    schedulers: Mapping[str, Any],
    module_kwargs: Mapping[str, Any],
    torch_kwargs: Mapping[str, Any],
    new_keys: bool,
) -> dict[str, Any]:
    """Read and check on every rank, agree, and only then change anything.

    Returns:
        The entries that are not read here, and those of module and accountant, as in Opacus.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it is cut short, of another run, or its key is missing; or another rank failed.
    """
    if path.is_dir():
        return checkpoint_sharded.load(
            run, accountant, path, with_optimizer=with_optimizer, schedulers=schedulers,
            module_kwargs=module_kwargs, torch_kwargs=torch_kwargs, new_keys=new_keys,
        )  # fmt: skip
    resume, problem = None, None
    try:
        check_load(run, module_kwargs)
        saved = read(path, torch_kwargs)
        keys, notes = check_fits(
            run,
            accountant,
            path,
            saved,
            with_optimizer,
            schedulers,
            new_keys,
            module_kwargs.get("strict", True),
        )
        resume = Resume(lay_out(run, saved), keys, notes)
    except Exception as error:
        if run.group is None:
            raise
        problem = error
    agree_on_content(run, path, resume and resume.digest(), problem)
    assert resume is not None
    return go_on(run, accountant, path, resume, with_optimizer, schedulers, module_kwargs)
