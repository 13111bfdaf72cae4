"""What σ and C may be, when they are given and whenever they are set anew."""

import math
from collections.abc import Sequence


def check_noise_multiplier(noise_multiplier: float) -> None:
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier}: give a finite number of 0 or more"
        )


def check_max_grad_norm(max_grad_norm: float | Sequence[float], clipping: str) -> None:
    limits = max_grad_norm if isinstance(max_grad_norm, Sequence) else [max_grad_norm]
    if not limits or not all(0 < limit < math.inf for limit in limits):
        raise ValueError(f"max_grad_norm is {max_grad_norm}: give a finite number above 0")
    if clipping == "flat" and isinstance(max_grad_norm, Sequence):
        raise ValueError("max_grad_norm is a list, which goes with clipping='per_layer'")
