"""What a checkpoint says about a run, and a run that goes on from it: for one file or a folder.

A load changes everything or nothing. What a checkpoint holds is compared with the run before
anything is assigned (compatibility.py). What can fail even so (memory, hooks of the user's modules,
another rank) is undone: until all ranks have succeeded each keeps what it had, parameters and
buffers as a copy on the CPU, the rest by reference.
"""

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from dp_clipping.checkpoint.file_format import (
    ACCOUNTANT,
    ALWAYS,
    MODULE,
    OPTIMIZER,
    OWN,
    RESERVED,
    VERSION,
    plain,
    scheduler_state,
)
from dp_clipping.checkpoint.ledger import Parts, count
from dp_clipping.checkpoint.run import Run, set_random_state
from dp_clipping.distributed.dtensor import local
from dp_clipping.noise.keys import Keys, fresh_keys


@dataclass(frozen=True)
class Snapshot:
    """What is saved of a run or loaded into it, and where.

    Attributes:
        path: the file, or the folder of a sharded model.
        with_optimizer: the wrapped optimizer's state (momentum) is part of it.
        schedulers: entry in the checkpoint -> scheduler whose state is part of it.
        module_kwargs: for the network's `state_dict`, or `load_state_dict`.
        torch_kwargs: for `torch.save`, or `torch.load`.
    """

    run: Run
    path: Path
    with_optimizer: bool
    schedulers: Mapping[str, Any]
    module_kwargs: Mapping[str, Any]
    torch_kwargs: Mapping[str, Any]

    def contents(
        self,
        extra: Mapping[str, Any],
        random: list[dict[str, Tensor]],
        optimizer_state: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """The entries of a checkpoint, `extra` ones of the user's among them."""
        contents = {
            **extra,
            MODULE: self.run.model.network.state_dict(**self.module_kwargs),
            ACCOUNTANT: plain(self.run.account.accountant.state_dict()),
            OWN: _own_entry(self.run, random),
        }
        if self.with_optimizer:
            contents[OPTIMIZER] = optimizer_state()
        for entry, scheduler in self.schedulers.items():
            contents[entry] = scheduler_state(scheduler)
        return contents


@dataclass(frozen=True)
class Resume:
    """A checkpoint that was read and found to fit, before anything is touched."""

    saved: dict[str, Any]
    keys: Keys | None = field(repr=False)
    """None: new ones are to be drawn."""
    kept: Parts
    """Steps that the engine has counted and the checkpoint lacks; they stay in the account."""
    notes: list[str]

    @property
    def own(self) -> dict[str, Any]:
        return self.saved[OWN]

    def digest(self) -> bytes:
        """Equal on two ranks that read the same checkpoint."""
        own = {k: v for k, v in self.own.items() if k != "random"}
        history = self.saved[ACCOUNTANT]["history"]
        what = repr((own, history, self.keys is None)).encode()
        return hashlib.blake2b(what, digest_size=31).digest()


def check_save(run: Run) -> None:
    refuse_fsdp1(run)
    if not run.model.step_state.is_idle:
        raise RuntimeError(
            "a checkpoint in the middle of a step would lose the sums in .grad: save after "
            "optimizer.step(), and with BatchMemoryManager after the last microbatch of a draw"
        )


def check_load(snapshot: Snapshot) -> None:
    refuse_fsdp1(snapshot.run)
    if not snapshot.run.model.step_state.is_idle:
        raise RuntimeError("load_checkpoint in the middle of a step: call zero_grad() before")
    if snapshot.module_kwargs.get("assign"):
        raise ValueError("assign=True would replace the parameters that are private: drop it")


def refuse_fsdp1(run: Run) -> None:
    """Its state is gathered by collectives, and an optimizer's holds pieces without a place."""
    if any(isinstance(module, FullyShardedDataParallel) for module in run.model.network.modules()):
        raise ValueError(
            "checkpoints of models in FullyShardedDataParallel (FSDP1) are not supported: shard "
            "the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )


def saved_parts(saved: Mapping[str, Any]) -> Parts:
    """The saved account by key; without that entry all of it may be of the saved key."""
    own, history = saved[OWN], saved[ACCOUNTANT]["history"]
    whole = own["steps"] - count(history), history
    return own.get("account", {own["key_fingerprint"]: whole})


def _own_entry(run: Run, random: list[dict[str, Tensor]]) -> dict[str, Any]:
    adaptive = run.optimizer.adaptive_threshold
    return {
        "version": VERSION,
        "run": run.describe(),
        "key_fingerprint": run.keys.fingerprint,
        "account": plain(run.account.parts()),
        "steps": run.optimizer.steps,
        "sampler": run.sampler_state(),
        "start": list(run.start),
        # As schedulers have left them; in "run" are the ones that make_private was given.
        "noise_multiplier": plain(run.optimizer.noise_multiplier),
        "max_grad_norm": plain(run.optimizer.max_grad_norm),
        "adaptive_threshold": None if adaptive is None else adaptive.state_dict(),
        "random": random,
    }


def go_on(snapshot: Snapshot, resume: Resume) -> dict[str, Any]:
    """Change the run to the saved one, with a warning for each note; every rank calls it.

    Returns:
        The entries that are not read here, and those of module and accountant, as in Opacus.

    Raises:
        ValueError: if it failed on this rank; RuntimeError: on another one. Nothing is changed.
    """
    run = snapshot.run
    keys = resume.keys or run.keys
    if resume.keys is None and not run.keys.fixed:
        keys = fresh_keys(run.group, run.device)  # also if this run has made steps already
    before, problem = Before(snapshot), None
    try:
        try:
            _apply(snapshot, resume, keys)
        except Exception as error:
            problem = refusal(snapshot.path, error)
        agree(run, f"load {snapshot.path}", problem)
    except BaseException:
        before.restore()
        raise
    if run.model.policy is not None:
        run.model.clear_gradients()
    set_random_state(run, resume.own["random"])
    kept = sum(count(part) for _, part in resume.kept.values())
    if kept:
        warnings.warn(
            f"{snapshot.path}: the account keeps {kept} of this engine's steps that are not in the "
            "checkpoint; those that the saved key makes again are not counted twice",
            stacklevel=4,
        )
    for note in resume.notes:
        warnings.warn(f"{snapshot.path}: {note}: the resumed run is not the same", stacklevel=4)
    return {n: entry for n, entry in resume.saved.items() if n not in RESERVED or n in ALWAYS}


def as_refusal(path: Path, error: Exception) -> Exception:
    """The error that a load raises: our own as it is, any other one on one line with the path."""
    if isinstance(error, ValueError | RuntimeError | OSError):
        return error
    return refusal(path, error)


def refusal(path: Path, error: Exception) -> ValueError:
    """The error of a load that failed, on one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    refused = ValueError(
        f"{path} cannot be loaded into this run ({type(error).__name__}: {reason}); nothing was "
        "changed: resume with the settings of the saved run, or load another checkpoint"
    )
    refused.__cause__ = error
    return refused


def agree(run: Run, what: str, problem: BaseException | None) -> None:
    """All ranks go on, or all raise: their own problem, or the number of a rank that has one."""
    if run.group is None:
        if problem is not None:
            raise problem
        return
    mine = torch.tensor([problem is None], dtype=torch.uint8, device=run.device)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(run.group))]
    dist.all_gather(of_ranks, mine, group=run.group)
    if problem is not None:
        raise problem
    failed = [rank for rank, success in enumerate(of_ranks) if not success.item()]
    if failed:
        raise RuntimeError(f"rank {failed[0]} could not {what}: its own error says why")


class Before:
    """What a load changes, as it was: attributes, what lists and dicts hold, and tensors' values.

    An optimizer's tensors are not copied: a load puts others in their place.
    """

    def __init__(self, snapshot: Snapshot):
        run = snapshot.run
        optimizer, loader = run.optimizer, run.poisson
        objects = [
            run, run.account, run.account.accountant, run.model, run.model.step_state,
            run.model.step_state.usage, run.model.step_state.microbatches, optimizer,
            optimizer.original_optimizer, optimizer.adaptive_threshold, loader,
            loader and loader.batch_sampler, *snapshot.schedulers.values(),
        ]  # fmt: skip
        self._containers: dict[int, tuple[Any, Any]] = {}
        for one in objects:
            if one is not None:
                self._keep(vars(one))
        self._network = run.model.network
        state = self._network.state_dict()
        tensors = [local(x) for x in state.values() if isinstance(x, Tensor)]
        self._tensors = [(x, x.to("cpu", copy=True)) for x in tensors]
        self._rest = {n: deepcopy(x) for n, x in state.items() if not isinstance(x, Tensor)}

    def _keep(self, container: Any) -> None:
        self._containers[id(container)] = container, container.copy()
        for value in container.values() if isinstance(container, dict) else container:
            if isinstance(value, dict | list | set | deque) and id(value) not in self._containers:
                self._keep(value)

    @torch.no_grad()
    def restore(self) -> None:
        for container, content in self._containers.values():
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        for x, value in self._tensors:
            x.copy_(value)
        if self._rest:
            self._network.load_state_dict(self._rest, strict=False)


def _apply(snapshot: Snapshot, resume: Resume, keys: Keys) -> None:
    run, saved, own = snapshot.run, resume.saved, resume.own
    optimizer = run.optimizer
    run.account.load(saved[ACCOUNTANT], saved_parts(saved), resume.kept, run)
    run.model.network.load_state_dict(saved[MODULE], **snapshot.module_kwargs)
    if snapshot.with_optimizer and OPTIMIZER in saved:
        optimizer.load_state_dict(saved[OPTIMIZER])
    for entry, scheduler in snapshot.schedulers.items():
        if entry in saved:
            scheduler.load_state_dict(deepcopy(saved[entry]))
    for name in ("noise_multiplier", "max_grad_norm"):
        if own["run"][name] == run.settings[name]:
            setattr(optimizer, name, own[name])
    if optimizer.adaptive_threshold is not None:
        optimizer.adaptive_threshold.load_state_dict(own["adaptive_threshold"])
        optimizer.max_grad_norm = optimizer.adaptive_threshold.max_grad_norm
    run.keys = keys
    optimizer.resume(own["steps"], run.keys.noise)
    _seek(run, own, same_keys=resume.keys is not None)


def _seek(run: Run, own: dict[str, Any], same_keys: bool) -> None:
    loader, state = run.poisson, own["sampler"]
    if loader is None:
        return
    loader.batch_sampler.rekey(run.keys.sampling)
    here = loader.state_dict()
    if state is not None and all(state[k] == here[k] for k in ("num_samples", "sample_rate")):
        loader.load_state_dict(state)
    run.start = tuple(own["start"]) if same_keys else (loader.position, own["steps"])
