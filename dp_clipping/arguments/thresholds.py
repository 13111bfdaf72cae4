"""The clipping threshold C, set by `make_private`, schedulers or an adaptive threshold."""

import math
from collections.abc import Sequence
from typing import Any

from dp_clipping.clipping.coefficients import clip_norms_of
from dp_clipping.kinds import number

LARGEST = 2.0**100
"""Largest factor in float32, which ends at 2¹²⁸: it leaves room for what it multiplies."""


def check_max_grad_norm(max_grad_norm: float | Sequence[float], clipping: str) -> None:
    """Raises WrongType or ValueError unless it is a number above 0, or a list of them by layer."""
    is_list = isinstance(max_grad_norm, list | tuple)
    clip_norms: Any = max_grad_norm if is_list else [max_grad_norm]
    for limit in clip_norms:
        number("a finite number above 0, or a list of such numbers").check("max_grad_norm", limit)
    if not clip_norms or not all(0 < limit < math.inf for limit in clip_norms):
        raise ValueError(f"max_grad_norm is {max_grad_norm}: give a finite number above 0")
    if clipping == "flat" and is_list:
        raise ValueError("max_grad_norm is a list, which goes with clipping='per_layer'")


def check_noise(noise_multiplier: float, sensitivity: float) -> None:
    """Raises ValueError if float32 noise of σC would overflow or come out as zero."""
    std = noise_multiplier * sensitivity
    if std and not 1 / LARGEST <= std <= LARGEST:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier} and max_grad_norm {sensitivity:g}: noise of "
            f"standard deviation {std:g} is beyond float32; give numbers whose product is from "
            f"{1 / LARGEST:.0e} to {LARGEST:.0e}"
        )


class Thresholds:
    """C of the next step, and the threshold C_k of each of its clipping groups.

    Args:
        max_grad_norm: C, or a list of thresholds, one per group.
        clipping: `"flat"` or `"per_layer"`.
        groups: names of the clipping groups; None: mode `no_dp` has none.

    Raises:
        ValueError: for a threshold that is no finite number above 0, or not one per group.
    """

    def __init__(
        self, max_grad_norm: float | list[float], clipping: str, groups: Sequence[str] | None
    ):
        self._clipping, self._groups = clipping, groups
        self._known: list[float] = []
        self.set(max_grad_norm)

    def set(self, max_grad_norm: float | list[float]) -> None:
        """Sets C from the next step on."""
        self._known = self._checked(max_grad_norm)
        self.max_grad_norm = max_grad_norm

    def clip_norms(self) -> list[float]:
        """Returns C_k of each clipping group."""
        if isinstance(self.max_grad_norm, list):  # whose entries may have changed
            return self._checked(self.max_grad_norm)
        return list(self._known)

    def _checked(self, max_grad_norm: float | list[float]) -> list[float]:
        groups = self._groups
        if groups is None:
            return []
        check_max_grad_norm(max_grad_norm, self._clipping)
        clip_norms = clip_norms_of(max_grad_norm, len(groups), self._clipping)
        if len(clip_norms) != len(groups):
            raise ValueError(
                f"max_grad_norm has {len(clip_norms)} thresholds for {len(groups)} clipping groups "
                f"({', '.join(groups[:4])}{', ...' if len(groups) > 4 else ''}): give one per "
                "group, or one number"
            )
        return clip_norms
