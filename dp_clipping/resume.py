"""What a checkpoint says about a run, and a run that goes on from it: for one file or a folder."""

import hashlib
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opacus.accountants.accountant import IAccountant
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from dp_clipping.checkpoint_file import ALWAYS, OWN, RESERVED, VERSION, plain
from dp_clipping.keys import Keys, fresh_keys
from dp_clipping.run import Run, set_random_state


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


def check_save(run: Run) -> None:
    refuse_fsdp1(run)
    if run.optimizer.is_mid_step:
        raise RuntimeError(
            "a checkpoint in the middle of a step would lose the sums in .grad: save after "
            "optimizer.step(), and with BatchMemoryManager after the last microbatch of a draw"
        )


def check_load(run: Run, module_kwargs: Mapping[str, Any]) -> None:
    refuse_fsdp1(run)
    if run.optimizer.is_mid_step:
        raise RuntimeError("load_checkpoint in the middle of a step: call zero_grad() before")
    if module_kwargs.get("assign"):
        raise ValueError("assign=True would replace the parameters that are private: drop it")


def refuse_fsdp1(run: Run) -> None:
    """Its state is gathered by collectives, and an optimizer's holds pieces without a place."""
    if any(isinstance(module, FullyShardedDataParallel) for module in run.model.network.modules()):
        raise ValueError(
            "checkpoints of models in FullyShardedDataParallel (FSDP1) are not supported: shard "
            "the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )


def own_entry(run: Run, random: list[dict[str, Tensor]]) -> dict[str, Any]:
    adaptive = run.optimizer.adaptive_threshold
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
        "adaptive_threshold": None if adaptive is None else adaptive.state_dict(),
        "random": random,
    }


def go_on(
    run: Run,
    accountant: IAccountant,
    path: Path,
    resume: Resume,
    with_optimizer: bool,
    schedulers: Mapping[str, Any],
    module_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Change the run to the saved one, with a warning for each note.

    Returns:
        The entries that are not read here, and those of module and accountant, as in Opacus.
    """
    _apply(run, accountant, resume, with_optimizer, schedulers, module_kwargs)
    for note in resume.notes:
        warnings.warn(f"{path}: {note}: the resumed run is not the same", stacklevel=4)
    return {n: entry for n, entry in resume.saved.items() if n not in RESERVED or n in ALWAYS}


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
    if optimizer.adaptive_threshold is not None:
        optimizer.adaptive_threshold.load_state_dict(own["adaptive_threshold"])
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
