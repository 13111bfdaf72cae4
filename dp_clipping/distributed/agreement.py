"""Compares the settings of each step over ranks before any noise is added.

Two replicas that add different multiples of one noise reveal the noiseless sum, and a shard with
less noise than the account assumes voids ε. So no rank takes a step on which ranks disagree.

Ranks compare a hash h of the settings in one all-reduce of two numbers: the MAX of [h, -h] has
opposite entries exactly if all hashes are equal. Only if they are not do ranks exchange the
settings themselves, for the message.

With parameters on the CPU, `optimizer.step()` exchanges over the ranks' own group: it synchronises
with the other ranks there anyway. With parameters on GPUs the exchange begins with the step's first
backward, over a gloo group of its own, and `optimizer.step()` reads its result: the host waits for
no GPU, and for another host only if that has not begun its backward.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

Settings = dict[str, Any]
REFUSAL = "refusal"  # the setting that says why a rank refuses its samples, or None


class Agreement:
    """Compares a step's settings over the ranks of a group.

    Every rank calls `check` once for each step that it takes. The settings of a step are those at
    its first backward; `begin` is called with them there.

    Args:
        group: the ranks.
        early: begin the exchange with the step's first backward and over a gloo group, as for
            parameters on GPUs. Every rank of `group` makes that group here.
    """

    def __init__(self, group: dist.ProcessGroup, *, early: bool):
        self.early = early
        self._group = _host_group(group) if early else group
        self._pending: tuple[Settings, torch.Tensor, Any] | None = None

    def begin(self, settings: Settings) -> None:
        """Begins the exchange when a step opens; once for a step that is begun again."""
        if self.early and (self._pending is None or self._pending[0] != settings):
            self._pending = settings, *self._launch(settings)

    def check(self, step: int, settings: Settings) -> None:
        """Raises RuntimeError on every rank, with the values by rank, if settings differ.

        Raises ValueError on every rank if one of them refuses its samples.
        """
        if not self.early:
            self._pending = settings, *self._launch(settings)
        assert self._pending is not None, "a step is begun before it is checked"
        (settings, extremes, work), self._pending = self._pending, None
        work.wait()
        highest, negated_lowest = extremes.tolist()
        if highest == -negated_lowest and settings.get(REFUSAL) is not None:
            raise ValueError(settings[REFUSAL])
        if highest != -negated_lowest:
            of_ranks = gathered(settings, self._group)
            for rank, of_rank in enumerate(of_ranks):
                if of_rank.get(REFUSAL) is not None:
                    raise ValueError(f"on rank {rank}: {of_rank[REFUSAL]}")
            raise RuntimeError(
                f"step {step} is not taken: {differences(of_ranks)}: change settings, and iterate "
                "over the loader, on every rank alike, such as by scheduler.step() on all ranks"
            )

    def sums(self, counts: list[int]) -> list[int]:
        """Returns the sums of each count over the ranks; every rank calls it."""
        total = torch.tensor(counts, device="cpu")
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def _launch(self, settings: Settings) -> tuple[torch.Tensor, Any]:
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> 1  # of 63 bits, so that it can be negated
        extremes = torch.tensor([number, -number], device="cpu")
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return extremes, work


def agree_on_settings(settings: Settings, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError on every rank, naming the settings in which ranks differ.

    Each rank would add other noise or sample others, and no replica would be what ε is about.
    """
    if group is not None and (found := differences(gathered(settings, group))):
        raise ValueError(f"{found}: give the same on all")


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks; every rank calls it."""
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, value, group=group)
    return of_ranks


def differences(of_ranks: list[Settings]) -> str:
    """Returns in which settings ranks differ, with the values by rank; "" where they agree."""
    found = []
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        values = [of_rank.get(name) for of_rank in of_ranks]
        if any(value != values[0] for value in values):
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            found.append(f"{name} ({shown})")
    return "ranks differ in " + ", ".join(found) if found else ""


_host_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a gloo group of the same ranks, cached: each has sockets and threads."""
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        is_part = len(ranks) < dist.get_world_size()
        _host_groups[group] = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=is_part
        )
    return _host_groups[group]
