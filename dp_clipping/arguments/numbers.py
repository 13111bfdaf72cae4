"""Checks σ, C and the divisor of a step, in `make_private` and whenever they change; ε and δ."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from dp_clipping.kinds import check_count, check_number

LOSS_REDUCTIONS = ("mean", "sum")
LARGEST = 2.0**100
"""Largest factor in float32, which ends at 2¹²⁸: it leaves room for what it multiplies."""


def check_noise_multiplier(noise_multiplier: float) -> None:
    wanted = "a finite number of 0 or more"
    check_number("noise_multiplier", noise_multiplier, wanted)
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier is {noise_multiplier}: give {wanted}")


def check_noise(noise_multiplier: float, sensitivity: float) -> None:
    """Raises ValueError if float32 noise of σC would overflow or come out as zero."""
    std = noise_multiplier * sensitivity
    if std and not 1 / LARGEST <= std <= LARGEST:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier} and max_grad_norm {sensitivity:g}: noise of "
            f"standard deviation {std:g} is beyond float32; give numbers whose product is from "
            f"{1 / LARGEST:.0e} to {LARGEST:.0e}"
        )


def check_expected_batch_size(expected_batch_size: float) -> None:
    wanted = "a finite number above 0: the samples that all ranks together expect in a step"
    check_number("expected_batch_size", expected_batch_size, wanted)
    if not 1 / LARGEST <= expected_batch_size <= LARGEST:
        raise ValueError(f"expected_batch_size is {expected_batch_size}: give {wanted}")


def check_loss_reduction(loss_reduction: str) -> None:
    if loss_reduction not in LOSS_REDUCTIONS:
        known = ", ".join(LOSS_REDUCTIONS)
        raise ValueError(f"loss_reduction {loss_reduction!r} is unknown: choose one of {known}")


def check_max_grad_norm(max_grad_norm: float | Sequence[float], clipping: str) -> None:
    is_list = isinstance(max_grad_norm, list | tuple)
    clip_norms: Any = max_grad_norm if is_list else [max_grad_norm]
    for limit in clip_norms:
        check_number("max_grad_norm", limit, "a finite number above 0, or a list of such numbers")
    if not clip_norms or not all(0 < limit < math.inf for limit in clip_norms):
        raise ValueError(f"max_grad_norm is {max_grad_norm}: give a finite number above 0")
    if clipping == "flat" and is_list:
        raise ValueError("max_grad_norm is a list, which goes with clipping='per_layer'")


def check_target(target_epsilon: float, target_delta: float, epochs: int) -> None:
    """Raises WrongType or ValueError for an argument of `make_private_with_epsilon`."""
    check_number("target_epsilon", target_epsilon, "a finite number above 0")
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon is {target_epsilon}: give a finite number above 0")
    check_number("target_delta", target_delta, "a number above 0, far below 1 / samples")
    if not 0 < target_delta < 1:
        raise ValueError(
            f"target_delta is {target_delta}: give a number above 0, far below 1 / samples"
        )
    check_count("epochs", epochs, "a whole number of 1 or more")
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}: give a whole number of 1 or more")


def warn_of_delta(delta: float, units: int, stacklevel: int) -> None:
    """Warns of a δ so large that publishing one of the units outright would count as private."""
    if units and delta >= 1 / units:
        example = min(0.1 / units, units**-1.1)
        warnings.warn(
            f"delta is {delta:g}, and the data have {units} units of privacy: from 1 / {units} = "
            f"{1 / units:.2g} on, publishing one of them as it is satisfies (ε, δ); give less, "
            f"such as {example:.1g}",
            stacklevel=stacklevel + 1,
        )
