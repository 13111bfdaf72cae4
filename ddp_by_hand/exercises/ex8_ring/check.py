"""The properties of exercise 8."""

import torch

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import numbers, same, show
from ddp_by_hand.exercises.record import COLLECTIVES

WORLD_SIZES = (2, 3, 1)


def reduced(rank: Rank, *shape: int) -> torch.Tensor:
    """Returns the solution's result for this rank's numbers; raises if it is not the sum."""
    tensor = numbers(*shape, seed=1, rank=rank.rank)
    expected = torch.stack([numbers(*shape, seed=1, rank=r) for r in range(rank.world_size)]).sum(0)
    rank.record.clear()
    answer = rank.solution.ring_all_reduce(tensor)
    if answer is not None and answer is not tensor:
        raise Wrong("the sum must be in the tensor that was given, not in a new one")
    if not same(tensor, expected):
        first = (~torch.isclose(tensor, expected, 1e-4, 1e-5)).flatten().nonzero()[0].item()
        here, there = tensor.flatten()[first:], expected.flatten()[first:]
        raise Wrong(
            f"of {list(shape)} numbers the first wrong is number {first}: {show(here[:1])} in "
            f"place of {show(there[:1])} on rank {rank.rank}"
        )
    return tensor


def divisible(rank: Rank) -> None:
    """Twelve numbers become their sum over the ranks."""
    reduced(rank, 12)


def not_divisible(rank: Rank) -> None:
    """Numbers that the ranks do not divide, or fewer than ranks, become their sum."""
    for count in (13, 7, 2, 1):
        reduced(rank, count)


def shapes(rank: Rank) -> None:
    """A matrix becomes its sum over the ranks."""
    reduced(rank, 5, 4)


def large(rank: Rank) -> None:
    """A million numbers become their sum over the ranks, without a deadlock."""
    reduced(rank, 1 << 20)


def by_hand(rank: Rank) -> None:
    """No ready-made collective is used."""
    reduced(rank, 12)
    used = rank.record.calls(*COLLECTIVES)
    if used:
        raise Wrong(f"{used[0].what} was called: use send and recv, or isend and irecv")


def neighbours(rank: Rank) -> None:
    """Each rank sends to its right neighbour only."""
    reduced(rank, 12)
    right = (rank.rank + 1) % rank.world_size
    others = {e.peer for e in rank.record.calls("send", "isend")} - {right}
    if others:
        raise Wrong(f"rank {rank.rank} also sends to {sorted(others)}, its neighbour is {right}")


def bytes_sent(rank: Rank) -> None:
    """Each rank sends 2 (W - 1) / W of the tensor."""
    tensor = reduced(rank, 1200)
    sent = sum(e.nbytes for e in rank.record.calls("send", "isend"))
    expected = 2 * (rank.world_size - 1) * tensor.nbytes // rank.world_size
    if sent != expected:
        raise Wrong(f"rank {rank.rank} sent {sent} bytes of {tensor.nbytes}, {expected} would do")


PROPERTIES = [divisible, not_divisible, shapes, large, by_hand, neighbours, bytes_sent]
