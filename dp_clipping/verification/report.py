"""The report of `PrivacyEngine.check`: norms and sums of both sides, tolerances and a verdict."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.clipping.statistics import NOT_COVERED
from dp_clipping.table import aligned

SHOWN = 8  # samples, in print


class Bounds(NamedTuple):
    """The largest relative errors that rounding may cause.

    Attributes:
        norm: of a sample's norm.
        gradient: of a parameter's clipped sum.
    """

    norm: float
    gradient: float


@dataclass(frozen=True, eq=False)
class Check:
    """A private step beside one ordinary backward per sample, for B samples. Not covered by ε.

    Attributes:
        norms: the unclipped norms of the private step, [B] float32 (float64).
        expected_norms: the norms from one backward per sample, [B] float64.
        norm_errors: the relative errors of the norms, each the largest over clipping groups, [B]
            float64. 0 where a norm is finite on neither side, infinite where it is finite on one.
        gradient_error: the error of the clipped sum of `worst_parameter`, beyond the margin of
            2·10⁻⁵ by which coefficients are smaller. It is relative to the sum or, where summands
            cancel, to a tenth of Σ_i c_i‖g_i‖ / √B.
        worst_parameter: the name of the parameter whose clipped sum has the largest error.
        clipped, expected_clipped: the clipped fraction of the samples with finite norms.
        tolerance: the largest errors that rounding may cause.
        setting: a description of what was run.
        random_sample: a sample whose loss differs between two runs; None if there is none. It is
            searched for only if both sides disagree.
    """

    norms: Tensor
    expected_norms: Tensor
    norm_errors: Tensor
    gradient_error: float
    worst_parameter: str
    clipped: float
    expected_clipped: float
    tolerance: Bounds
    setting: str
    random_sample: int | None = None

    @property
    def norm_error(self) -> float:
        """Returns the largest error of a norm."""
        return float(self.norm_errors.max())

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """Lists differences above the tolerances; empty if both sides agree."""
        if self.random_sample is not None:
            return [
                f"the loss of sample {self.random_sample} differs between two runs of the same "
                "sample: the network or the criterion is random in evaluation too, say by "
                "torch.rand, so norms cannot be compared; let it draw only if self.training"
            ]
        found = []
        if not self.norm_error <= self.tolerance.norm:
            found.append(
                f"the norm of sample {int(self.norm_errors.argmax())} is off by "
                f"{self.norm_error:.1e} (at most {self.tolerance.norm:.1e})"
            )
        if not self.gradient_error <= self.tolerance.gradient:
            found.append(
                f"the clipped sum of {self.worst_parameter} is off by {self.gradient_error:.1e} "
                f"(at most {self.tolerance.gradient:.1e})"
            )
        return found

    def __str__(self) -> str:
        worst = self.norm_errors.argsort(descending=True, stable=True)[:SHOWN].sort().values
        bad, expected_bad = (int((~n.isfinite()).sum()) for n in (self.norms, self.expected_norms))
        rows = [
            ["", "private", "one by one", "error"],
            *([f"norm of sample {i}", f"{self.norms[i]:.6g}", f"{self.expected_norms[i]:.6g}",
               f"{float(self.norm_errors[i]):.1e}"] for i in worst.tolist()),
            ["samples clipped", f"{self.clipped:.1%}", f"{self.expected_clipped:.1%}", "–"],
            ["samples not finite", str(bad), str(expected_bad), "–"],
            ["clipped sum, worst parameter", "", "", f"{self.gradient_error:.1e}"],
        ]  # fmt: skip
        left_out = len(self.norms) - len(worst)
        praise = (
            f"ok: norms agree within {self.tolerance.norm:.1e}, "
            f"clipped sums within {self.tolerance.gradient:.1e}"
        )
        title = self.setting + (f"; {left_out} norms that are closer left out" if left_out else "")
        return "\n".join([
            title, "", *aligned(rows, [False, True, True, True]), "",
            f"worst parameter: {self.worst_parameter}",
            *(f"FAIL: {fault}" for fault in self.faults),
            *([praise] if self.ok else []),
            f"Dropout was off. {NOT_COVERED}",
        ])  # fmt: skip


def norm_errors(found: Tensor, expected: Tensor, clip_norms: Tensor, floor: float) -> Tensor:
    """Returns relative errors [B] of norms [K, B].

    The floor is a part of the largest norm, or of C_k if that is smaller.
    """
    finite = expected.isfinite().all(0)
    largest = expected[:, finite].amax() if finite.any() else clip_norms.new_zeros(())
    smallest = floor * clip_norms.clamp(max=largest)[:, None]
    errors = (found - expected).abs() / (expected + smallest)
    errors = errors.where(found != expected, 0).amax(0)
    agree = found.isfinite().all(0) == finite
    return errors.where(finite, 0).where(agree, torch.inf)


def gradient_errors(
    found: Mapping[Parameter, Tensor | None],
    expected: Mapping[Parameter, Tensor],
    floor: float,
    scales: Mapping[Parameter, float] | None = None,
    margins: Mapping[Parameter, float] | None = None,
) -> dict[Parameter, float]:
    """Returns (‖Σ - Σ'‖ - m) / max(‖Σ'‖, s) for each parameter, or 0 where that is less.

    The floor is a part of the norm of all parameters' expected sums together.

    Args:
        scales: s of each parameter, 0 by default. A sum below s consists of summands that have
            cancelled, and of rounding.
        margins: m of each parameter, 0 by default: so much may lack by intention.
    """
    smallest = floor * float(torch.stack([total.norm() for total in expected.values()]).norm())
    errors, scales, margins = {}, scales or {}, margins or {}
    for parameter, total in expected.items():
        sum_ = found[parameter]
        distance = float((total if sum_ is None else total - sum_.view_as(total)).norm())
        if 0 < (margin := margins.get(parameter, 0.0)) < torch.inf:
            distance = 0.0 if distance <= margin else distance - margin
        whole = max(float(total.norm()), scales.get(parameter, 0.0)) + smallest
        error = (distance / whole if whole else torch.inf) if distance else 0.0
        errors[parameter] = error if error == error else torch.inf
    return errors
