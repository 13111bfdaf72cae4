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
"""

import hashlib
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from opacus.accountants.accountant import IAccountant
from torch import Tensor

from dp_clipping.checkpoint_file import (
    ALWAYS,
    OWN,
    RESERVED,
    VERSION,
    check_contents,
    plain,
    read,
    scheduler_state,
    write,
)  # fmt: skip
from dp_clipping.fits import check_fits
from dp_clipping.keys import Keys, fresh_keys
from dp_clipping.run import (
    Run,
    agree_on_content,
    agree_on_success,
    random_states,
    set_random_state,
)  # fmt: skip


@dataclass(frozen=True)
class Resume:
    """A checkpoint that was read and found to fit, before anything is touched."""

    saved: dict[str, Any]
    keys: Keys | None = field(repr=False)
    """None: new ones are to be drawn."""
    notes: list[str]

    @property
    def own(self) -> dict[str, Any]:
        return self.saved[OWN]

    def digest(self) -> bytes:
        """Equal on two ranks that read the same checkpoint."""
        own = {k: v for k, v in self.own.items() if k != "random"}
        history = self.saved["privacy_accountant_state_dict"]["history"]
        what = repr((own, history, self.keys is None)).encode()
        return hashlib.blake2b(what, digest_size=31).digest()


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
    if run.optimizer.is_mid_step:
        raise RuntimeError(
            "a checkpoint in the middle of a step would lose the sums in .grad: save after "
            "optimizer.step(), and with BatchMemoryManager after the last microbatch of a draw"
        )
    random = random_states(run)
    problem = None
    if run.group is None or dist.get_rank(run.group) == 0:
        try:
            contents = {
                **extra,
                "module_state_dict": run.model.network.state_dict(**module_kwargs),
                "privacy_accountant_state_dict": plain(accountant.state_dict()),
                OWN: _own_entry(run, random),
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


def _own_entry(run: Run, random: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "run": run.describe(),
        "key_fingerprint": run.keys.fingerprint,
        "steps": run.optimizer.steps,
        "sampler": run.sampler_state(),
        "start": list(run.start),
        # As schedulers have left them; in "run" are the ones that make_private was given.
        "noise_multiplier": plain(run.optimizer.noise_multiplier),
        "max_grad_norm": plain(run.optimizer.max_grad_norm),
        "random": random,
    }


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
    resume, problem = None, None
    try:
        if run.optimizer.is_mid_step:
            raise RuntimeError("load_checkpoint in the middle of a step: call zero_grad() before")
        if module_kwargs.get("assign"):
            raise ValueError("assign=True would replace the parameters that are private: drop it")
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
        resume = Resume(saved, keys, notes)
    except Exception as error:
        if run.group is None:
            raise
        problem = error
    agree_on_content(run, path, resume and resume.digest(), problem)
    assert resume is not None
    saved = resume.saved
    _apply(run, accountant, resume, with_optimizer, schedulers, module_kwargs)
    for note in resume.notes:
        warnings.warn(f"{path}: {note}: the resumed run is not the same", stacklevel=3)
    return {n: entry for n, entry in saved.items() if n not in RESERVED or n in ALWAYS}


def _apply(
    run: Run,
    accountant: IAccountant,
    resume: Resume,
    with_optimizer: bool,
    schedulers: Mapping[str, Any],
    module_kwargs: Mapping[str, Any],
) -> None:
    saved, own, optimizer = resume.saved, resume.own, run.optimizer
    accountant.load_state_dict(deepcopy(saved["privacy_accountant_state_dict"]))
    run.model.network.load_state_dict(saved["module_state_dict"], **module_kwargs)
    if with_optimizer and "optimizer_state_dict" in saved:
        optimizer.load_state_dict(saved["optimizer_state_dict"])
    for entry, scheduler in schedulers.items():
        if entry in saved:
            scheduler.load_state_dict(deepcopy(saved[entry]))
    if all(
        own["run"][name] == run.settings[name] for name in ("noise_multiplier", "max_grad_norm")
    ):
        optimizer.noise_multiplier = own["noise_multiplier"]
        optimizer.max_grad_norm = own["max_grad_norm"]
    if resume.keys is not None:
        run.keys = resume.keys
    elif not run.keys.fixed:
        run.keys = fresh_keys(run.group, run.device)  # also if this run has made steps already
    optimizer.resume(own["steps"], run.keys.noise)
    _seek(run, own, same_keys=resume.keys is not None)
    if run.model.policy is not None:
        run.model.clear_gradients()
    set_random_state(run, own["random"])


def _seek(run: Run, own: dict[str, Any], same_keys: bool) -> None:
    loader, state = run.poisson, own["sampler"]
    if loader is None:
        return
    loader.batch_sampler.rekey(run.keys.sampling)
    here = loader.state_dict()
    if state is not None and all(state[k] == here[k] for k in ("num_samples", "sample_rate")):
        loader.load_state_dict(state)
    run.start = tuple(own["start"]) if same_keys else (loader.position, own["steps"])
