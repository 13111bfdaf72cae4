"""Checks of the clipping threshold C, and of the noise that is scaled with it."""

import math
from collections.abc import Sequence
from typing import Any

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
