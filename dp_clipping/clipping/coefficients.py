"""From norms to coefficients: how much of each sample's gradient is summed.

| function | c(n) | source |
| --- | --- | --- |
| `abadi` | min(1, C / n) | Abadi et al. 2016, arXiv:1607.00133 |
| `automatic` | C / (n + γ) | Bu et al. 2022, arXiv:2206.07136 |

Both bound a contribution c(n)·n by C, whatever n is: that bound is the sensitivity to which noise
is calibrated. So n is never the norm as computed but an upper bound of the norm of what is summed,
with a margin for its own rounding, and a sample whose norm is not finite contributes nothing.

**Which C.** Squared norms are float32 (float64 for a model in float64), and a square below 2⁻¹²⁶
may be computed as zero. Of a gradient of N numbers that takes at most √N·2⁻⁶³ from n: 1e-13 for
10¹² numbers. Under a threshold C_k ≥ `LOWEST` that is far less than the margin, and with γ ≥
`LOWEST` n + γ is not below the true norm. A square above 3.4e38 is infinite: a sample of n > 1.8e19
contributes nothing. Up to `HIGHEST` every C and every coefficient is a float32 number. So

    LOWEST ≤ C_k ≤ HIGHEST   and, for `automatic`,   LOWEST ≤ γ ≤ HIGHEST

and what is outside is refused. A norm that is formed as a product of two needs more, since a square
that is lost in one factor may be multiplied with a large one: see norms.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CLIPPING_FUNCTIONS = ("abadi", "automatic")
GAMMA = 0.01
LOWEST, HIGHEST = 1e-10, 1e30
MARGIN = {torch.float64: 2.0**-40, torch.float32: 2e-5}


def clip_norms_of(
    max_grad_norm: float | Sequence[float], groups: int, clipping: str
) -> list[float]:
    """Returns C_k of each group: C itself for one, C/√K for K groups, or the list that was given.

    Σ C_k² = C² in each case: the sum over groups has sensitivity C.

    Raises:
        ValueError: for a threshold that float32 norms cannot be compared with.
    """
    if isinstance(max_grad_norm, Sequence):
        clip_norms = [float(c) for c in max_grad_norm]
    elif clipping == "flat":
        clip_norms = [float(max_grad_norm)]
    else:
        clip_norms = [float(max_grad_norm) / groups**0.5] * groups
    for limit in clip_norms:
        check_range("max_grad_norm", limit, "" if len(clip_norms) == 1 else " a clipping group")
    return clip_norms


def check_range(name: str, value: float, of: str = "") -> None:
    """Raises ValueError for a C_k or γ with which a contribution could not be kept below C."""
    if not LOWEST <= value <= HIGHEST:
        raise ValueError(
            f"{name} is {value}{of}, and squares of float32 norms hold numbers from {LOWEST:g} "
            f"to {HIGHEST:g}: give one of those, say {name}=1.0, and scale the loss if gradients "
            "are that small or large"
        )


def coefficients(
    squared_bounds: Tensor, clip_norms: Tensor, function: str, gamma: float = GAMMA
) -> Tensor:
    """Returns c [K, B] from upper bounds of squared norms [K, B] and thresholds [K], K groups.

    Zero for a sample of which any group's bound is not finite.
    """
    margin = 1 + MARGIN[squared_bounds.dtype]
    norms = squared_bounds.sqrt() * margin
    clip_norms = clip_norms.to(norms)[:, None]
    if function == "abadi":
        scale = (clip_norms / norms).clamp(max=1.0)
    else:  # finite: an infinite one times zero would be NaN
        scale = (clip_norms / (norms + gamma)).clamp(max=torch.finfo(norms.dtype).max)
    return torch.where(finite_samples(squared_bounds), scale, 0.0)


def finite_samples(squared_bounds: Tensor) -> Tensor:
    """Returns which samples have finite norms in all groups: bool [B] from [K, B]."""
    return torch.isfinite(squared_bounds).all(dim=0)
