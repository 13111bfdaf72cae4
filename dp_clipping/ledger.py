"""Which steps an account holds, by the key that they drew from: so that a load forgets none.

A history of Opacus's accountants is a list of (σ, q, number of steps). Whether the steps of one
history are among those of another cannot be told from it, and a load that takes the saved one for
the engine's would lower ε where the engine has made other steps meanwhile. So the steps of each key
are listed apart, here and in a checkpoint. The same key draws the same noise for the same samples,
so of two lists of one key the longer one has the steps of both; lists of different keys compose.
"""

from collections.abc import Mapping

History = list[tuple[float, float, int]]
"""(noise multiplier, sample rate, number of steps), in the order in which they were counted."""

Parts = dict[str, History]
"""By the key's fingerprint, which is public."""

OTHERS = ""
"""In place of a fingerprint: steps that no run of this engine has made (of a user's own mechanism,
or of an accountant that was handed on)."""


def count(history: History) -> int:
    """Steps, not entries."""
    return sum(steps for _, _, steps in history)


def after(history: History, steps: int) -> History:
    """What follows the first `steps` of them."""
    rest = []
    for sigma, rate, number in history:
        left = number - min(number, steps)
        steps -= number - left
        if left:
            rest.append((sigma, rate, left))
    return rest


def joined(first: History, second: History) -> History:
    """One after the other, equal neighbours as one entry."""
    whole: History = []
    for sigma, rate, steps in [*first, *second]:
        if whole and whole[-1][:2] == (sigma, rate):
            steps += whole.pop()[2]
        whole.append((sigma, rate, steps))
    return whole


class Ledger:
    """The steps in an engine's account, by key.

    What a step of this process was made on top of, itself included, counts as released from then
    on, and no load takes it away. An account that was only loaded gives way to the next one: who
    looks at one checkpoint after the other has released nothing.
    """

    def __init__(self) -> None:
        self._parts: Parts = {}
        self._released: Parts = {}
        self._is_used = False  # a step was counted since the last load
        self._end = (0, 0)  # of the history as last seen: entries, steps of the last one
        self._loaded_for: object = None

    def attribute(self, history: History, fingerprint: str = OTHERS) -> None:
        """What has been added to the accountant's history since the last call is of this key."""
        entries, steps = self._end
        new = after(history[max(entries - 1, 0) :], steps)
        if new and len(history) >= entries:
            self._parts[fingerprint] = joined(self._parts.get(fingerprint, []), new)
            self._is_used = True
        self._end = _end(history)

    def parts(self, history: History) -> Parts:
        """Of the accountant's present history; for a checkpoint."""
        self.attribute(history)
        return dict(self._parts)

    def beyond(
        self, saved: Mapping[str, History], history: History, run: object, fingerprint: str | None
    ) -> Parts:
        """Released steps that a load of `saved` for this run would forget.

        Without those of the key that the run goes on with, if it is a saved one: they are drawn
        again, the same ones.

        Args:
            history: the accountant's, before the load.
            fingerprint: of the key to go on with; None for a new one.
        """
        self.attribute(history)
        is_anothers = self._loaded_for is not None and self._loaded_for is not run
        if self._is_used or is_anothers:
            for key, part in self._parts.items():
                if count(part) > count(self._released.get(key, [])):
                    self._released[key] = part
            self._is_used = False
        lost = {
            key: after(part, count(saved.get(key, [])))
            for key, part in self._released.items()
            if key != fingerprint
        }
        return {key: part for key, part in lost.items() if part}

    def load(
        self, saved: Mapping[str, History], kept: Parts, history: History, run: object
    ) -> None:
        """After a load for this run: the account is the saved one and what `beyond` has found.

        `history`: the accountant's, as it is now.
        """
        self._parts = {key: list(part) for key, part in saved.items()}
        for key, part in kept.items():
            self._parts[key] = joined(self._parts.get(key, []), part)
        self._end, self._loaded_for = _end(history), run


def _end(history: History) -> tuple[int, int]:
    return len(history), history[-1][2] if history else 0
