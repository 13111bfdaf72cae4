"""The report of an audit: the stated ε beside lower bounds on the true one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dp_clipping.audit.attacks import Guesses
from dp_clipping.audit.bound import epsilon_lower_bound, refutes_curve
from dp_clipping.audit.curve import Curve

LESS, MORE = (0.7, 0.5), (1.25, 1.5, 2.0, 3.0, 5.0)  # noise, in multiples of what is stated
OF_CURVE = 0.8  # of 1 − confidence, for the bound that refutes more


@dataclass(frozen=True)
class AuditReport:
    """Bounds from below what one private run gives away; prints as text. Not covered by ε.

    Both bounds hold together with probability `confidence`: a run whose account is right fails in
    at most 1 − `confidence` of audits.

    Attributes:
        epsilon: what the account states for the run.
        delta: δ.
        confidence: of both bounds together.
        noise_multiplier, sample_rate, steps: σ, q and the steps of the run.
        canaries: m; `included` of them were in the data.
        epsilon_lower_bound: the run is not (ε, δ)-private for any smaller ε (Steinke et al. 2023).
        guesses: those that it comes from.
        refuted_noise: the run is not as private as it would be with this noise multiplier, at all
            δ together (Mahloujifar et al. 2024); infinite if no such noise was found.
        curve_guesses: those that refute it; None: no noise is refuted.
        noise_faults: what tests of the noise of each parameter and step have found, which see
            noise that canaries do not get. Right noise has one with probability 1e-4 at most.
    """

    epsilon: float
    delta: float
    confidence: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    canaries: int
    included: int
    epsilon_lower_bound: float
    guesses: Guesses
    refuted_noise: float
    curve_guesses: Guesses | None
    noise_faults: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Returns whether the account may be right."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """Lists what refutes the account; empty if nothing does."""
        found = []
        if self.epsilon_lower_bound > self.epsilon:
            found.append(
                f"epsilon is at least {self.epsilon_lower_bound:.3g}, and {self.epsilon:.3g} is "
                "stated"
            )
        if self.refuted_noise <= self.noise_multiplier:
            found.append(
                f"the run is not as private as with noise multiplier {self.refuted_noise:.3g}, and "
                f"{self.noise_multiplier:.3g} is stated"
            )
        return [*found, *self.noise_faults]

    def __str__(self) -> str:
        lines = [
            ("stated", f"epsilon {self.epsilon:.4g} at delta {self.delta:g}"),
            ("run", f"noise multiplier {self.noise_multiplier:g}, sample rate "
                    f"{self.sample_rate:.4g}, {self.steps} steps"),
            ("canaries", f"{self.canaries}, of which {self.included} in the data"),
            ("epsilon is at least", f"{self.epsilon_lower_bound:.4g}: {self.guesses}"),
            ("refuted noise multiplier", self._noise()),
            ("confidence", f"{self.confidence:.4g}"),
        ]  # fmt: skip
        return "\n".join([
            *(f"{name + ':':26}{value}" for name, value in lines), "",
            *(f"FAIL: {fault}" for fault in self.faults),
            *(["ok: nothing that the run shows refutes its account, which is no proof"]
              if self.ok else []),
        ])  # fmt: skip

    def _noise(self) -> str:
        if self.curve_guesses is None:
            return f"none, up to {MORE[-1] * self.noise_multiplier:.4g}"
        return f"{self.refuted_noise:.4g}: {self.curve_guesses}"


def bounds_of(
    canaries: int, guesses: Sequence[Guesses], curve: Callable[[float], Curve], delta: float,
    confidence: float, noise_multiplier: float,
) -> dict[str, Any]:  # fmt: skip
    """Returns lower bounds of an `AuditReport`, which hold together with this confidence.

    Each test may be wrong with a part of 1 − `confidence` that is fixed before the run, and the
    parts add up to 1 (C. Bonferroni, 1936).

    Args:
        guesses: of all attacks. Which there are must not depend on the canaries' coins.
        curve: the account's (ε, δ) with noise of so many times the stated standard deviation.
    """

    def bound(g: Guesses) -> float:
        level = 1 - (1 - confidence) * (1 - OF_CURVE) * g.share
        return epsilon_lower_bound(canaries, g.made, g.correct, delta, level)

    def refuted(g: Guesses, pairs: Curve) -> bool:
        level = 1 - (1 - confidence) * OF_CURVE * g.share
        return refutes_curve(canaries, g.made, g.correct, pairs, level)

    found = list(map(bound, guesses))
    best = max(range(len(found)), key=found.__getitem__)

    def refuting(scale: float) -> Guesses | None:
        pairs = curve(scale)
        return next((g for g in guesses if refuted(g, pairs)), None) if pairs else None

    scale, witness = 1.0, refuting(1.0)
    if witness is not None:
        for less in LESS:
            smaller = refuting(less)
            if smaller is None:
                break
            scale, witness = less, smaller
    else:
        scale, low, high = math.inf, 0, len(MORE)  # those below `low` are not refuted
        while low < high:
            middle = (low + high) // 2
            more = refuting(MORE[middle])
            if more is None:
                low = middle + 1
            else:
                high, scale, witness = middle, MORE[middle], more
    return {
        "epsilon_lower_bound": found[best], "guesses": guesses[best],
        "refuted_noise": scale * noise_multiplier, "curve_guesses": witness,
    }  # fmt: skip
