"""Findings of `experiments.verify_correctness`, and the tolerances for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ddp_by_hand.experiments.verify_correctness.cases import Case, Sizes
from dp_clipping.clipping.norms import GRAM_ROUNDING

MOST = 1 + 1e-6  # of C: what one sample may add


@dataclass(frozen=True)
class Tolerance:
    """Relative errors that rounding may cause.

    Attributes:
        norm: the error of a sample's norm.
        gradient: the error of a parameter's clipped sum.
        least: what one sample adds to a clipping group, over min(C_k, n_k).
    """

    norm: float
    gradient: float
    least: float


TOLERANCES = {
    torch.float32: Tolerance(norm=1e-4, gradient=2e-4, least=1 - 1e-4),
    torch.bfloat16: Tolerance(norm=6e-2, gradient=1e-1, least=1 - 1e-2),
}


def tolerance(case: Case, sizes: Sizes, dtype: torch.dtype) -> Tolerance:
    """Returns the tolerances of a case.

    Norms from Gram matrices are increased by an allowance for rounding before they clip.

    It is GRAM_ROUNDING in proportion to (Σ_t ‖a_t‖‖y_t‖)², or T ‖G‖² where tokens neither cancel
    nor agree; what a sample adds is smaller by half of that.
    """
    found = TOLERANCES[dtype]
    if case.norm_algorithm != "width":
        return found
    allowance = GRAM_ROUNDING * sizes.tokens
    return replace(found, gradient=found.gradient + allowance, least=found.least - allowance)


@dataclass(frozen=True)
class Finding:
    """Errors that a case has shown, on one rank or on all of them.

    Attributes:
        tolerance: what it is judged by.
        norm_error: largest, relative, over samples.
        gradient_error: largest over parameters, see `lm.gradients`; `parameter` is whose.
        contribution: what one sample adds to a clipping group, largest, in units of its C_k.
        least: the same in units of min(C_k, n_k), smallest.
        alike: all ranks have the same norms of all samples, to the last bit.
        parts: of each rank, its norms of all samples before they are added up or handed round (None
            where it has no part).
        norms: of each rank, the same afterwards.
        reference: what these should be.
        phases: the phases of the first rank, see `phases.phase_times`; empty without profiling.
        failure: why there are no numbers.
    """

    case: Case
    tolerance: Tolerance
    norm_error: float = float("inf")
    gradient_error: float = float("inf")
    parameter: str = ""
    contribution: float = float("inf")
    least: float = 0.0
    alike: bool = True
    seconds: float = 0.0
    parts: tuple[tuple[float | None, ...], ...] = ()
    norms: tuple[tuple[float, ...], ...] = ()
    reference: tuple[float, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def faults(self) -> list[str]:
        """Lists what is wrong, with what would be right; empty if the case agrees."""
        if self.failure:
            return [self.failure]
        found, tolerance = [], self.tolerance
        if not self.norm_error <= tolerance.norm:
            found.append(f"a norm is off by {self.norm_error:.1e} (at most {tolerance.norm:.0e})")
        if not self.gradient_error <= tolerance.gradient:
            found.append(
                f"the clipped gradient of {self.parameter} is off by {self.gradient_error:.1e} "
                f"(at most {tolerance.gradient:.0e})"
            )
        if not self.contribution <= MOST:
            found.append(f"one sample adds {self.contribution:.7f} C (at most {MOST:.6f})")
        if not self.least >= tolerance.least:
            found.append(
                f"one sample adds only {self.least:.6f} min(C, n) (at least {tolerance.least:g})"
            )
        if not self.alike:
            found.append("ranks have different norms after the exchange")
        return found


def merge(findings: Sequence[Finding]) -> Finding:
    """Merges the findings of all ranks into the worst of each figure."""
    first = findings[0]
    worst = max(findings, key=lambda f: f.gradient_error)
    return replace(
        first,
        norm_error=max(f.norm_error for f in findings),
        gradient_error=worst.gradient_error,
        parameter=worst.parameter,
        contribution=max(f.contribution for f in findings),
        least=min(f.least for f in findings),
        alike=all(f.norms == first.norms for f in findings),
        seconds=max(f.seconds for f in findings),
        parts=tuple(part for f in findings for part in f.parts),
        norms=tuple(norms for f in findings for norms in f.norms),
    )
