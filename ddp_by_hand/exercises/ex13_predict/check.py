"""The properties of exercise 13, against `experiments.simulate` on the same cases."""

import random
from math import isclose

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.experiments.simulate.step import run
from ddp_by_hand.lm.exchange import Contention, Network

WORLD_SIZES = (1,)


def expect(found: float, right: float, what: str, why: str) -> None:
    if not isinstance(found, int | float) or not isclose(found, right, rel_tol=1e-6, abs_tol=1e-9):
        raise Wrong(f"{what} is {found!r} and should be {right:.6g}: {why}")


def bandwidth(rank: Rank) -> None:
    """Without latency, an all-reduce sends 2 (W - 1) / W of its bytes."""
    for ranks in (1, 2, 3, 8, 64):
        right = Network(0, 100.0, ranks, 0, 1).seconds("all_reduce", 1000.0, ranks)
        found = rank.solution.all_reduce_seconds(1000.0, ranks, 0.0, 100.0)
        why = f"each rank sends {2 * (ranks - 1)} chunks of 1/{ranks} of the bytes"
        expect(found, right, f"all_reduce_seconds(1000.0, {ranks}, 0.0, 100.0)", why)


def latency(rank: Rank) -> None:
    """Each of the 2 (W - 1) hops has its latency."""
    for ranks in (1, 2, 8):
        found = rank.solution.all_reduce_seconds(0.0, ranks, 0.5, 100.0)
        what = f"all_reduce_seconds(0.0, {ranks}, 0.5, 100.0)"
        expect(found, ranks - 1.0, what, f"a ring of {ranks} has {2 * (ranks - 1)} hops")


def compare(rank: Rank, pieces: list[float], sends: list[float], slowdown: float, why: str) -> None:
    program = []
    for piece, send in zip(pieces, sends, strict=True):
        program += [("compute", piece), ("send", send)]
    right = run([*program, ("wait", len(sends))], Contention(slowdown, 1.0, 0.0)).step
    found = rank.solution.step_seconds(list(pieces), list(sends), slowdown)
    expect(found, right, f"step_seconds({pieces}, {sends}, {slowdown})", why)


def hidden(rank: Rank) -> None:
    """Communication beside computation costs nothing without contention; the last is exposed."""
    compare(rank, [1.0, 4.0, 1.0], [2.0, 0.5, 0.25], 1.0, "only the last collective is exposed")
    compare(rank, [3.0], [2.0], 1.0, "nothing is computed beside the only collective")


def queued(rank: Rank) -> None:
    """Collectives are worked off one after another."""
    why = "a collective begins when the one before it has ended, and its piece is computed"
    compare(rank, [1.0, 1.0, 1.0], [5.0, 2.0, 1.0], 1.0, why)
    compare(rank, [1.0, 6.0, 1.0], [2.0, 3.0, 0.5], 1.0, why)


def contention(rank: Rank) -> None:
    """Computation advances at 1 / slowdown while a collective is under way, and only then."""
    why = "computation is slower exactly while something is sent"
    compare(rank, [1.0, 4.0], [2.0, 0.0], 2.0, why)
    compare(rank, [1.0, 1.0], [8.0, 0.0], 1.5, why)
    for seed in range(40):
        draw = random.Random(seed)
        count = draw.randrange(1, 7)
        pieces = [draw.randrange(1, 9) / 4 for _ in range(count)]
        sends = [draw.randrange(1, 9) / 4 for _ in range(count)]
        compare(rank, pieces, sends, draw.choice([1.25, 1.5, 2.0]), why)


def stops(rank: Rank) -> None:
    """A variant pays until its efficiency first falls below the limit."""
    cases = [
        ({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4}, 0.8, 4),
        ({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.24}, 0.8, 8),
        ({1: 1.0, 2: 2.0, 4: 1.1}, 0.8, 1),
        ({1: 2.0, 2: 2.5, 4: 3.0}, 0.8, 2),
        ({1: 1.0, 8: 1.5, 16: 1.6}, 0.8, 0),
    ]
    for steps, limit, right in cases:
        counts = list(steps)[not right :]
        found = rank.solution.last_that_pays(steps.__getitem__, counts, limit)
        what = f"last_that_pays for steps {steps}, counts {counts} and the limit {limit}"
        expect(found, right, what, "efficiency is step_on(1) / step_on(W)")


PROPERTIES = [bandwidth, latency, hidden, queued, contention, stops]
