"""The order in which cells are measured: interleaved rounds, balanced for what ran before.

Measuring all of A and then all of B mixes the difference between A and B with everything that
drifts meanwhile (temperature, clocks, a neighbour's job). So every round runs every cell once,
and a ratio compares cells within a round. The cell that ran just before may leave something
behind too (a warm cache, a fragmented allocator), so predecessors are balanced as well.
"""

import random
from collections.abc import Sequence


def plan_rounds(cells: Sequence, rounds: int, seed: int) -> list[tuple[int, object]]:
    """Returns `rounds * len(cells)` pairs (round, cell), a pure function of its arguments.

    Every rank that calls it with the same arguments gets the same order. Within its rounds the
    order is a Williams design (E. J. Williams, 1949): over n rounds of n cells each cell stands
    once in each position and, for even n, follows each other cell exactly once; for odd n every
    second round runs backwards, and the balance is complete after 2n rounds. In any two
    consecutive rounds of three or more cells, no cell follows the same one twice.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    generator = random.Random(seed)
    shuffled = list(cells)
    generator.shuffle(shuffled)
    offsets = list(range(len(shuffled)))
    generator.shuffle(offsets)
    order = []
    for number in range(rounds):
        order += [(number, shuffled[i]) for i in _williams_row(len(shuffled), number, offsets)]
    return order


def _williams_row(n: int, number: int, offsets: list[int]) -> list[int]:
    """Returns the permutation of 0..n-1 for round `number`.

    The zigzag 0, 1, n-1, 2, n-2, ... has the steps 1, -2, 3, -4, ... modulo n. For even n they
    all differ, so shifting the zigzag by each offset produces every ordered pair of neighbours
    once. For odd n they are all odd and those of the reversed zigzag all even.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    row = [(step + offsets[number % n]) % n for step in zigzag]
    return row[::-1] if n % 2 and number % 2 else row
