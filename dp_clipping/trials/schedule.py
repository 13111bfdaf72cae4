"""Selects the calls that are checked: 1, 2, 4, 8, ..., and those that are much larger."""

from random import Random

LEVELS = ("first", "sampled", "off")
SAMPLED = 64  # calls, of which one more is checked on average if some are sampled


class Schedule:
    """Counts calls, and says which of them are due for a check.

    A call that is not counted stays due: one that a check learnt nothing from.

    Args:
        level: one of `LEVELS`: `"sampled"` selects others too, the same in each process; `"off"`
            none.

    Attributes:
        count: calls so far.
        checks: checks so far.
        largest: the size of the largest batch of which all samples were checked.
    """

    def __init__(self, level: str = "first") -> None:
        self._level = level
        self.count = self.checks = self.largest = 0

    def is_due(self, size: int = 0) -> bool:
        """Returns whether the next call, with a batch of this size, is checked."""
        if self._level == "off":
            return False
        is_power = self.count & (self.count + 1) == 0
        if self._level == "sampled":
            is_power = is_power or not Random(self.count).randrange(SAMPLED)
        return is_power or size >= 2 * self.largest > 0

    def next_is_due(self, size: int = 0) -> bool:
        """Counts a call; returns whether it is checked."""
        due = self.is_due(size)
        self.count += 1
        return due

    def skip(self, calls: int) -> None:
        """Counts this number of calls as seen."""
        self.count += calls

    def next_check(self, size: int) -> tuple[int, bool]:
        """Counts a check.

        Returns:
            Its number, from 0, and whether all samples take part: no batch as large was checked.
        """
        number, is_whole = self.checks, size > self.largest
        self.checks += 1
        self.largest = max(self.largest, size)
        return number, is_whole
