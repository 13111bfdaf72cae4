"""Describes what the steps of an account release: the mechanism, noise and sampling together.

An account holds the steps of one mechanism: no theorem is known that adds up two of them, and some
hold for other neighbouring data sets than others. `arguments.sampled` chooses the mechanism.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dp_clipping.accounting.history import History

Epsilon = Callable[[Sequence[History], float], float]
"""(steps of each key, δ) -> ε."""

ADD_OR_REMOVE = "add or remove one unit"
ZERO_OUT = "replace one unit by an empty one, which adds nothing (zero-out)"


@dataclass(frozen=True)
class Mechanism:
    """Noise and sampling of an engine's runs, and what they cost.

    Attributes:
        name: identifies the mechanism, with all constants that `epsilon` depends on beside the
            history. An engine counts steps of one name.
        sampler: how the units of a step are chosen, for the statement.
        relation: the neighbouring data sets for which ε holds.
        accountant: what computes ε, for the statement; None: the engine's accountant.
        epsilon: returns ε at δ of the steps of each key, composed. The history of a key has its
            steps from the first one on, as (σ, q, number of steps): step i of a key was made of
            batch i since the key came into use, and an epoch has round(1/q) batches. None: the
            engine's accountant computes it.
        curve: of the steps of each key and a δ: returns ε as a function of δ, for many of these.
            None: `epsilon` is fast enough.
        constants: what `epsilon` depends on beside the history, by name.
    """

    name: str = "gaussian"
    sampler: str = "poisson"
    relation: str = ADD_OR_REMOVE
    accountant: str | None = None
    epsilon: Epsilon | None = None
    curve: "Callable[[Sequence[History], float], Callable[[float], float]] | None" = None
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def refuse_beside(self, before: "Mechanism | None", history: History) -> None:
        """Raises ValueError if an account cannot hold steps of this mechanism.

        Args:
            before: the mechanism of the engine's runs so far; None: there is none.
            history: the steps that the account has.
        """
        if before is None:
            before = DEFAULT if history else self
        if self.name != before.name:
            add = ", and add up their ε and δ" if self.relation == before.relation else ""
            raise ValueError(
                f"the mechanism is {self.name!r}, and this engine has accounted for "
                f"{before.name!r}: no account of both is known, use a PrivacyEngine for each{add}"
            )


DEFAULT = Mechanism()
"""Gaussian noise on Poisson batches, which Opacus's accountants count."""


def batches_per_epoch(history: History) -> int:
    """Returns b = 1/q, the smallest number of steps between two uses of a unit.

    1, which counts each step as a use, if steps had different q.
    """
    found = {round(1 / rate) for _, rate, _ in history}
    return found.pop() if len(found) == 1 else 1
