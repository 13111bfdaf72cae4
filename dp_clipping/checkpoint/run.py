"""One private run as a checkpoint sees it, and how its ranks agree."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from dp_clipping.accounting.ledger import Account
from dp_clipping.accounting.target_epsilon import Plan
from dp_clipping.checkpoint.random_states import set_states, states_of
from dp_clipping.distributed.dtensor import size_of
from dp_clipping.noise.keys import Keys
from dp_clipping.noise.secure.certificate import Certificate
from dp_clipping.sampling.loader import PoissonLoader

POISSON = "poisson"


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
        unused_from: the number of the loader's batch after the last one that is in a step.
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
    unused_from: int = 0
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

    @property
    def next_batch(self) -> int:
        """Returns the number of the batch of the next step, if each is in one step, in order."""
        return self.start[0] + self.optimizer.steps - self.start[1]

    def refuse_batch(self, sampling: str, *, in_order: bool) -> None:
        """Raises RuntimeError if the account of a sampling does not cover the step's batch.

        What did not come from the loader at all is not refused with Poisson sampling.
        """
        number = self.model.step_state.batch_number
        if number is None:
            if sampling == POISSON:
                return
            raise RuntimeError(
                f"the batch of this step did not come from the data_loader that make_private "
                f"returned, and ε of sampling={sampling!r} covers no other: use the returned one, "
                "for x, y in loader:"
            )
        if in_order and number != self.next_batch:
            raise RuntimeError(
                f"this step has batch {number} of the loader, and ε of sampling={sampling!r} needs "
                f"each batch in one step, in order: call optimizer.zero_grad() and begin another "
                f"iteration, for x, y in loader:, which yields batch {self.next_batch}"
            )
        if number < self.unused_from:
            raise RuntimeError(
                f"this step has batch {number} of the loader, which is in a step already, and ε is "
                "of batches that are sampled independently: do not set the loader back, and begin "
                "another iteration, for x, y in loader:; engine.load_checkpoint sets a run back"
            )

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

    def sampler_state(self) -> dict[str, int | float] | None:
        """Returns the position at which the loader continues after a resume.

        A Poisson batch that was handed out and not used comes again. One that was used is not,
        also if the loader was not told of it.
        """
        if self.poisson is None:
            return None
        state = self.poisson.state_dict()
        if self.poisson.batch_sampler.scheme.in_order:
            state["position"] = self.next_batch
            return state
        step_state = self.model.step_state
        if step_state.usage.handed is None and step_state.batch_number is not None:
            state["position"] = step_state.batch_number  # another loader has taken it
        state["position"] = max(state["position"], self.next_batch, self.unused_from)
        return state


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


# ---- random states -------------------------------------------------------------------------------


def random_states(run: PrivateRun) -> list[dict[str, Tensor]]:
    """Returns the random states of each rank, so that dropout and augmentation go on as they were.

    Not that of a generator of the user's own.
    """
    states = states_of(run.device)
    joined = torch.cat([*states.values()]).to(run.device)
    lengths = [len(state) for state in states.values()]
    of_ranks = _gathered(run, joined)
    return [dict(zip(states, x.cpu().split(lengths), strict=True)) for x in of_ranks]


def set_random_state(run: PrivateRun, states: list[dict[str, Tensor]]) -> None:
    """Restores this rank's random states, if they were saved from as many ranks as are there."""
    if len(states) == run.world_size:
        set_states(states[run.rank], run.device)


# ---- agreement -----------------------------------------------------------------------------------


def agree(run: PrivateRun, what: str, problem: BaseException | None) -> None:
    """Returns on all ranks, or raises on all: a rank's own problem, or the number of a rank with
    a problem."""
    _answers(run, what, problem, RuntimeError)


def together(run: PrivateRun, what: str, action: Callable[[], Any]) -> Any:
    """Runs `action`; returns its result on all ranks, or raises on all; see `agree`."""
    result, problem = None, None
    try:
        result = action()
    except Exception as error:
        problem = error
    agree(run, what, problem)
    return result


def agree_on_content(
    run: PrivateRun, path: Path, digest: bytes | None, problem: Exception | None
) -> None:
    """Returns if all ranks have read the same, else raises on all.

    Args:
        digest: the digest of the data that this rank has read, 31 bytes; None if it could not.
    """
    content = digest or bytes(31)
    of_ranks = _answers(run, f"load {path}", problem, ValueError, content)
    if any(not torch.equal(answer, of_ranks[0]) for answer in of_ranks):
        raise ValueError(f"ranks have read different checkpoints from {path}: is the disk shared?")


def _answers(
    run: PrivateRun, what: str, problem: BaseException | None, kind: type[Exception],
    content: bytes = b"",
) -> list[Tensor]:  # fmt: skip
    """Returns the content of each rank, or raises on all; an error of `kind` on other ranks."""
    answer = torch.tensor([problem is None, *content], dtype=torch.uint8, device=run.device)
    of_ranks = _gathered(run, answer)
    if problem is not None:
        raise problem
    failed = [rank for rank, answer in enumerate(of_ranks) if not answer[0]]
    if failed:
        raise kind(f"rank {failed[0]} could not {what}: its own error says why")
    return of_ranks


def _gathered(run: PrivateRun, x: Tensor) -> list[Tensor]:
    """Returns the tensors of all ranks, of one shape; RuntimeError if some rank is not here."""
    if run.group is None:
        return [x]
    of_ranks = [torch.empty_like(x) for _ in range(run.world_size)]
    try:
        dist.all_gather(of_ranks, x, group=run.group)
    except RuntimeError as error:
        raise RuntimeError(
            "not all ranks have come to this save_checkpoint or load_checkpoint: call it on every "
            f"rank, between the same two steps, and not under `if rank == 0` ({error})"
        ) from error
    return of_ranks
