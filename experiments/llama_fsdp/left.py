"""Estimates how long the rest of a grid will take, from the cells that are finished.

A cell's time is a start, the same for all (processes, imports, weights), and its steps. Of a mode
and length that has been measured the steps' time is known, in an earlier call too. Of another
length it follows from the nearest one of that mode, in proportion to the tokens; of a mode without
any, from the others' at the nearest length. Lengths go from short to long, so a mean over cells
would promise too little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median

from experiments.llama_fsdp.results import GridCell
from measure import OK


class TimeLeft:
    """Args: `steps` that a cell takes, those of the warm-up included; `known` results."""

    def __init__(self, steps: int, known: Iterable[dict] = ()):
        self._steps = steps
        self._step_s: dict[tuple[str, int], float] = {}  # mode and length
        self._starts: list[float] = []
        self._seconds: list[float] = []
        for result in known:
            self._learn(result)

    def note(self, seconds: float, result: dict) -> None:
        """Notes the time and the result of a cell that this call has run."""
        self._seconds.append(seconds)
        if self._learn(result):
            taken = self._steps * self._step_s[result["mode"], result["seq_length"]]
            self._starts.append(max(0.0, seconds - taken))

    def of(self, cells: Sequence[GridCell]) -> float | None:
        """Estimates the seconds that these cells will take; None before anything is known."""
        if not self._seconds:
            return None
        if not self._starts:  # failed cells say nothing about others
            return mean(self._seconds) * len(cells)
        start = median(self._starts)
        return sum(start + self._steps * self._step(c.mode, c.seq_length) for c in cells)

    def _learn(self, result: dict) -> bool:
        if result["status"] != OK:
            return False
        self._step_s[result["mode"], result["seq_length"]] = result["median_time_ms"] / 1e3
        return True

    def _step(self, mode: str, length: int) -> float:
        """Estimates the seconds of one step."""
        own = {n: s for (m, n), s in self._step_s.items() if m == mode}
        if not own:
            nearest = self._nearest((n for _, n in self._step_s), length)
            own = {nearest: mean(s for (_, n), s in self._step_s.items() if n == nearest)}
        nearest = self._nearest(own, length)
        return own[nearest] * length / nearest

    @staticmethod
    def _nearest(lengths: Iterable[int], length: int) -> int:
        return min(lengths, key=lambda n: abs(n - length))
