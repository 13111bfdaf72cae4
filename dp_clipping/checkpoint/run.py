"""One private run: what `make_private` returned, and what its ranks agree on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from dp_clipping.checkpoint.ledger import Account
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.distributed.agreement import differences
from dp_clipping.model import PrivateModel
from dp_clipping.noise.keys import Keys
from dp_clipping.optimizer import PrivateOptimizer
from dp_clipping.sampling.loader import PoissonLoader


@dataclass
class Run:
    """What one `make_private` returned, and its public settings.

    `account`: of the engine.
    `start`: position of the loader and number of steps at which the key came into use.
    """

    model: PrivateModel
    optimizer: PrivateOptimizer
    loader: DataLoader
    group: dist.ProcessGroup | None
    keys: Keys = field(repr=False)
    settings: dict[str, Any]
    account: Account = field(repr=False)
    criterion: PrivateCriterion
    start: tuple[int, int] = (0, 0)

    @property
    def poisson(self) -> PoissonLoader | None:
        return self.loader if isinstance(self.loader, PoissonLoader) else None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def describe(self) -> dict[str, Any]:
        """Its public settings; a load compares all of them but the mode (see compatibility.py)."""
        network, sharding = self.model.network, self.model.sharding
        data_parallel_group = self.group if sharding is None else sharding.data_parallel_group
        parameters = {n: list(p.shape) for n, p in network.named_parameters() if p.requires_grad}
        return {
            **self.settings,
            "world_size": 1 if self.group is None else dist.get_world_size(self.group),
            "data_ranks": 1
            if data_parallel_group is None
            else dist.get_world_size(data_parallel_group),
            "device": self.device.type,
            "optimizer": type(self.optimizer.original_optimizer).__name__,
            "private": self.model.policy is not None,
            "parameters": parameters,
        }

    def sampler_state(self) -> dict[str, int | float] | None:
        """Where the loader goes on after a resume.

        A draw that was handed out and not used is drawn again. One that was used is not, also if
        the loader was not told of it.
        """
        if self.poisson is None:
            return None
        state = self.poisson.state_dict()
        used = self.start[0] + self.optimizer.steps - self.start[1]
        if self.model.step_state.draw is not None:
            state["position"] = self.model.step_state.draw
        state["position"] = max(state["position"], used)
        return state


def random_states(run: Run) -> list[dict[str, Tensor]]:
    """torch's random state of each rank: dropout must go on where it was.

    Python's and numpy's, and a generator that the user gave the loader, are the user's.
    """
    states = [torch.get_rng_state()]
    if run.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(run.device))
    joined = torch.cat(states).to(run.device)
    lengths = [len(state) for state in states]
    of_ranks = [joined]
    if run.group is not None:
        of_ranks = [torch.empty_like(joined) for _ in range(dist.get_world_size(run.group))]
        dist.all_gather(of_ranks, joined, group=run.group)
    names = ("cpu", "cuda")
    return [dict(zip(names, x.cpu().split(lengths), strict=False)) for x in of_ranks]


def set_random_state(run: Run, states: list[dict[str, Tensor]]) -> None:
    """Only with as many ranks as were saved: otherwise no rank is the one that it was."""
    world_size = 1 if run.group is None else dist.get_world_size(run.group)
    if len(states) != world_size:
        return
    state = states[0 if run.group is None else dist.get_rank(run.group)]
    # Not views of one another: torch reads the storage.
    torch.set_rng_state(state["cpu"].clone())
    if "cuda" in state and run.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), run.device)


def agree_on_settings(settings: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Every rank raises ValueError, naming the settings in which ranks differ.

    Each would add another noise or draw other samples, and no replica would be what ε is about.
    """
    if group is not None and (found := differences(settings, group)):
        raise ValueError(f"{found}: give the same on all")


def agree_on_success(run: Run, path: Path, problem: Exception | None) -> None:
    """All ranks go on when rank 0 has written, or all raise."""
    if run.group is None:
        return
    success = torch.tensor([problem is None], dtype=torch.uint8, device=run.device)
    dist.broadcast(success, group=run.group, group_src=0)
    if problem is not None:
        raise problem
    if not success.item():
        raise RuntimeError(f"rank 0 could not write {path}: its own error says why")


def agree_on_content(run: Run, path: Path, digest: bytes | None, problem: Exception | None) -> None:
    """All ranks have read the same (31 bytes, None if nothing) and may go on, or all raise."""
    if run.group is None:
        return
    mine = bytes(32) if digest is None else b"\1" + digest
    message = torch.tensor(list(mine), dtype=torch.uint8, device=run.device)
    gathered = [torch.empty_like(message) for _ in range(dist.get_world_size(run.group))]
    dist.all_gather(gathered, message, group=run.group)
    if problem is not None:
        raise problem
    failed = [rank for rank, answer in enumerate(gathered) if not answer[0]]
    if failed:
        raise ValueError(f"rank {failed[0]} could not load {path}: its own error says why")
    if any(not torch.equal(answer, gathered[0]) for answer in gathered):
        raise ValueError(f"ranks have read different checkpoints from {path}: is the disk shared?")
