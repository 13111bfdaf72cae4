"""Puts a run where a checkpoint of it was, from one file or from a folder.

A load changes everything or nothing. The checkpoint is compared with the run before anything is
assigned (compatibility.py). A later failure (memory, hooks of the user's modules, another rank) is
undone: until all ranks have succeeded, each keeps its old state, parameters and buffers as a copy
on the CPU, the rest by reference.
"""

import warnings
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_clipping.accounting.history import Parts, count
from dp_clipping.checkpoint.file_format import (
    ACCOUNTANT,
    ALWAYS,
    DETAILS,
    MODULE,
    OPTIMIZER,
    RESERVED,
)
from dp_clipping.checkpoint.random_states import set_states
from dp_clipping.checkpoint.run import PrivateRun, Snapshot, agree
from dp_clipping.distributed.dtensor import is_fsdp1, local
from dp_clipping.noise.keys import Keys, fresh_keys
from dp_clipping.noise.secure.certificate import Certificate

LEFT_BY_SCHEDULERS = (
    "noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction",
)  # fmt: skip
"""Settings of an optimizer that may have changed since `make_private`."""


@dataclass(frozen=True)
class Resume:
    """A checkpoint that was read and found to fit, before anything is changed.

    Attributes:
        saved: its entries.
        keys: those to continue with; None: new ones are to be made.
        unsaved: steps that the engine has counted and the checkpoint lacks; they stay in the
            account.
        notes: what deserves a warning.
    """

    saved: dict[str, Any]
    keys: Keys | None = field(repr=False)
    unsaved: Parts
    notes: list[str]

    @property
    def details(self) -> dict[str, Any]:
        return self.saved[DETAILS]


def check_save(run: PrivateRun) -> None:
    """Raises an error for a run that cannot be saved, or not now."""
    refuse_fsdp1(run)
    if not run.model.step_state.is_idle:
        raise RuntimeError(
            "a checkpoint in the middle of a step would lose the sums in .grad: save after "
            "optimizer.step(), and with BatchMemoryManager after the last microbatch of a batch"
        )


def check_load(snapshot: Snapshot) -> None:
    """Raises an error if no checkpoint can be loaded into the run, or not at this moment."""
    refuse_fsdp1(snapshot.run)
    if not snapshot.run.model.step_state.is_idle:
        raise RuntimeError("load_checkpoint in the middle of a step: call zero_grad() before")
    if snapshot.module_kwargs.get("assign"):
        raise ValueError("assign=True would replace the parameters that are private: drop it")


def refuse_fsdp1(run: PrivateRun) -> None:
    """Raises ValueError for FSDP1: pieces in its optimizer state do not say where they lie."""
    if any(is_fsdp1(module) for module in run.model.network.modules()):
        raise ValueError(
            "checkpoints of models in FullyShardedDataParallel (FSDP1) are not supported: shard "
            "the model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )


def go_on(snapshot: Snapshot, resume: Resume) -> dict[str, Any]:
    """Changes the run to the saved one, with a warning for each note. All ranks call it.

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
    states = resume.details["random"]
    if len(states) == run.world_size:  # otherwise no rank is the one that it was
        set_states(states[run.rank], run.device)
    steps = sum(count(part) for _, part in resume.unsaved.values())
    if steps:
        warnings.warn(
            f"{snapshot.path}: the account keeps {steps} of this engine's steps that are not in "
            "the checkpoint; those that the saved key makes again are not counted twice",
            stacklevel=5,
        )
    for note in resume.notes:
        warnings.warn(f"{snapshot.path}: {note}: the resumed run is not the same", stacklevel=5)
    return {n: entry for n, entry in resume.saved.items() if n not in RESERVED or n in ALWAYS}


def refusal(path: Path, error: Exception) -> ValueError:
    """Returns the error of a load that failed, on one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    refused = ValueError(
        f"{path} cannot be loaded into this run ({type(error).__name__}: {reason}); nothing was "
        "changed: resume with the settings of the saved run, or load another checkpoint"
    )
    refused.__cause__ = error
    return refused


class Before:
    """Saves the state that a load changes: attributes, contents of containers, tensors.

    An optimizer's tensors are not copied: a load puts others in their place.
    """

    def __init__(self, snapshot: Snapshot):
        run = snapshot.run
        optimizer, loader = run.optimizer, run.poisson
        objects = [
            run, run.account, run.account.accountant, run.model, run.model.step_state,
            run.model.step_state.usage, run.model.thresholds,
            optimizer, optimizer.noise, optimizer.original_optimizer, optimizer.adaptive_threshold,
            loader, loader and loader.batch_sampler, *snapshot.schedulers.values(),
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
    run, saved, details = snapshot.run, resume.saved, resume.details
    optimizer = run.optimizer
    account = saved[ACCOUNTANT]
    run.account.load(account, details["account"], resume.unsaved, run)
    run.model.network.load_state_dict(saved[MODULE], **snapshot.module_kwargs)
    if snapshot.with_optimizer and OPTIMIZER in saved:
        optimizer.load_state_dict(saved[OPTIMIZER])
    for entry, scheduler in snapshot.schedulers.items():
        if entry in saved:
            scheduler.load_state_dict(deepcopy(saved[entry]))
    for name in LEFT_BY_SCHEDULERS:
        if details["run"][name] == run.settings[name] and name in details:
            setattr(optimizer, name, details[name])
    if optimizer.adaptive_threshold is not None:
        optimizer.adaptive_threshold.load_state_dict(details["adaptive_threshold"])
        optimizer.max_grad_norm = optimizer.adaptive_threshold.max_grad_norm
    # Of steps that are made or loaded: the account keeps those of this process too.
    others = details.get("other_batches", 0)
    run.account.other_batches = max(run.account.other_batches, others)
    if details.get("certificate") is not None:
        run.account.cover(Certificate(*details["certificate"]))
    run.keys = keys
    run.account.hand_over(keys.fingerprint, run)
    optimizer.resume(details["steps"], run.keys.noise)
    _seek(run, details, same_keys=resume.keys is not None)


def _seek(run: PrivateRun, details: dict[str, Any], same_keys: bool) -> None:
    loader, state = run.poisson, details["sampler"]
    if loader is None:
        return
    here = loader.state_dict()
    if state is not None and all(state[k] == here[k] for k in ("num_samples", "sample_rate")):
        loader.usage.restart(state["position"])  # the steps of later batches are undone with them
        loader.load_state_dict(state)
    else:  # of other data, for new keys: its batches follow those of this loader
        loader.usage.restart(loader.position)
    run.start = tuple(details["start"]) if same_keys else (loader.position, details["steps"])
    loader.batch_sampler.rekey(run.keys.sampling, run.start[0])
