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
        every_larger: each larger batch is checked, and not only one of twice the size.
        is_open: the last check has not passed, so the next call is checked too.
    """

    def __init__(self, level: str = "first") -> None:
        self._level = level
        self.count = self.checks = self.largest = 0
        self.every_larger = self.is_open = False

    def is_due(self, size: int = 0) -> bool:
        """Returns whether the next call, with a batch of this size, is checked."""
        if self._level == "off" or self.is_open:
            return self.is_open
        is_power = self.count & (self.count + 1) == 0
        if self._level == "sampled":
            is_power = is_power or not Random(self.count).randrange(SAMPLED)
        return is_power or size >= (1 + self.largest if self.every_larger else 2 * self.largest) > 1

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
        number = self.checks
        self.checks += 1
        return number, size > self.largest

    def passed(self, size: int) -> None:
        """Notes that a batch of this size has passed its check."""
        self.is_open, self.largest = False, max(self.largest, size)
