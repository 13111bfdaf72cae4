"""One private run as a checkpoint sees it, and how its ranks agree."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dp_clipping.accounting.ledger import Account
from dp_clipping.accounting.target_epsilon import Plan
from dp_clipping.distributed.agreement import gathered
from dp_clipping.distributed.dtensor import size_of
from dp_clipping.noise.keys import Keys
from dp_clipping.noise.secure.certificate import Certificate
from dp_clipping.sampling.loader import PoissonLoader


@dataclass
class PrivateRun:
    """The objects that one `make_private` returned, with their key and public settings.

    `PrivacyEngine` makes one per `make_private` and keeps it; saving reads it, loading changes it.

    Attributes:
        model, optimizer: a `PrivateModel` and a `PrivateOptimizer`, of folders above this one.
        group: all ranks of the run; None: this process alone.
        settings: arguments of `make_private`, public.
        account: the engine's.
        start: position of the loader and number of steps at which the key came into use.
        certificate: what secure noise costs the steps of this run so far; None for other noise.
        units_digest: of which examples are together in `unit_ids`; "" without. Not for files.
        plan: the training that `target_epsilon` was given for; None: there is no target.
        said: what was said of steps beyond it, and of constants that are none.
        public_constants: see `Settings`.
    """

    model: Any
    optimizer: Any
    loader: DataLoader
    group: dist.ProcessGroup | None
    keys: Keys = field(repr=False)
    settings: dict[str, Any]
    account: Account = field(repr=False)
    criterion: Any
    start: tuple[int, int] = (0, 0)
    certificate: Certificate | None = None
    units_digest: str = field(default="", repr=False)
    plan: Plan | None = None
    said: set[str] = field(default_factory=set, repr=False)
    public_constants: dict[str, bool] = field(default_factory=dict)

    def follow(self, plan: Plan) -> None:
        """Keeps what the training was planned to be, and ends it there if that is to be so."""
        self.plan = plan
        if plan.stop and self.poisson is not None:
            self.poisson.is_over = lambda: (
                self.model.training and self.optimizer.steps >= plan.steps
            )

    @property
    def poisson(self) -> PoissonLoader | None:
        """Returns the loader, if its batches are Poisson samples."""
        return self.loader if isinstance(self.loader, PoissonLoader) else None

    @property
    def units(self) -> int:
        """Returns the number of units of privacy in the data."""
        units = self.settings["num_units"]
        if units is None:
            units = -(-self.settings["num_samples"] // self.settings["examples_per_unit"])
        return units

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return size_of(self.group)

    def describe(self) -> dict[str, Any]:
        """Returns the public settings; a load compares all of them but the mode."""
        network, sharding = self.model.network, self.model.sharding
        data_parallel_group = self.group if sharding is None else sharding.data_parallel_group
        parameters = {n: list(p.shape) for n, p in network.named_parameters() if p.requires_grad}
        optimizer = self.optimizer.original_optimizer  # of `ddp`'s sharded ones, what they run
        return {
            **self.settings,
            "world_size": self.world_size,
            "data_ranks": size_of(data_parallel_group),
            "device": self.device.type,
            "optimizer": getattr(optimizer, "cls", type(optimizer)).__name__,
            "private": self.model.policy is not None,
            "parameters": parameters,
        }


@dataclass(frozen=True)
class Snapshot:
    """The parts of a run that are saved and loaded.

    Attributes:
        path: the file, or the folder of a sharded model.
        with_optimizer: the wrapped optimizer's state (momentum) is part of it.
        schedulers: entry in the checkpoint -> scheduler whose state is part of it.
        module_kwargs: for the network's `state_dict`, or `load_state_dict`.
        torch_kwargs: for `torch.save`, or `torch.load`.
        key_file: the file of the key.
        weights: which of the network's are written: `"all"`, `"trainable"` or `"none"`.
    """

    run: PrivateRun
    path: Path
    with_optimizer: bool
    schedulers: Mapping[str, Any]
    module_kwargs: Mapping[str, Any]
    torch_kwargs: Mapping[str, Any]
    key_file: Path
    weights: str = "all"


def agree(
    run: PrivateRun, what: str, problem: BaseException | None, content: Any = None,
    kind: type[Exception] = RuntimeError,
) -> None:  # fmt: skip
    """Returns on all ranks, or raises on all.

    Args:
        problem: why this rank could not do `what`; other ranks raise `kind` with its number.
        content: identifies what this rank has read.
    """
    of_ranks = of_all_ranks(run, (problem is None, content))
    if problem is not None:
        raise problem
    failed = [rank for rank, (succeeded, _) in enumerate(of_ranks) if not succeeded]
    if failed:
        raise kind(f"rank {failed[0]} could not {what}: its own error says why")
    if len(set(of_ranks)) > 1:
        raise ValueError(f"ranks have read other content to {what}: is the disk shared?")


def together(run: PrivateRun, what: str, action: Callable[[], Any]) -> Any:
    """Runs `action`; returns its result on all ranks, or raises on all; see `agree`."""
    result, problem = None, None
    try:
        result = action()
    except Exception as error:
        problem = error
    agree(run, what, problem)
    return result


def of_all_ranks(run: PrivateRun, value: Any) -> list[Any]:
    """Returns the values of all ranks; RuntimeError if some rank is not here."""
    if run.group is None:
        return [value]
    try:
        return gathered(value, run.group)
    except RuntimeError as error:
        raise RuntimeError(
            "not all ranks have come to this save_checkpoint or load_checkpoint: call it on every "
            f"rank, between the same two steps, and not under `if rank == 0` ({error})"
        ) from error
