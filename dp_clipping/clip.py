"""From norms to coefficients: how much of each sample's gradient is summed.

| function | c(n) | source |
| --- | --- | --- |
| `abadi` | min(1, C / n) | Abadi et al. 2016, arXiv:1607.00133 |
| `automatic` | C / (n + γ) | Bu et al. 2022, arXiv:2206.07136 |

Both bound a contribution c(n)·n by C, whatever n is: that bound is the sensitivity to which noise
is calibrated. So n is never the norm as computed but an upper bound of the norm of what is summed,
with a margin for its own rounding, and a sample whose norm is not finite contributes nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CLIPPING_FUNCTIONS = ("abadi", "automatic")
GAMMA = 0.01
MARGIN = {torch.float64: 2.0**-40, torch.float32: 2e-5}


def thresholds(max_grad_norm: float | Sequence[float], groups: int, clipping: str) -> list[float]:
    """C_k of each group: C itself for one, C/√K for K groups, or the list that was given.

    Σ C_k² = C² in each case: the sum over groups has sensitivity C.
    """
    if isinstance(max_grad_norm, Sequence):
        return [float(c) for c in max_grad_norm]
    if clipping == "flat":
        return [float(max_grad_norm)]
    return [float(max_grad_norm) / groups**0.5] * groups


def coefficients(
    squared_bounds: Tensor, limits: Tensor, function: str, gamma: float = GAMMA
) -> Tensor:
    """c [K, B] from upper bounds of squared norms [K, B] and thresholds [K], K groups.

    Zero for a sample of which any group's bound is not finite.
    """
    margin = 1 + MARGIN[squared_bounds.dtype]
    norms = squared_bounds.sqrt() * margin
    limits = limits.to(norms)[:, None]
    scale = (limits / norms).clamp(max=1.0) if function == "abadi" else limits / (norms + gamma)
    return torch.where(finite_samples(squared_bounds), scale, 0.0)


def finite_samples(squared_bounds: Tensor) -> Tensor:
    """Which samples have finite norms in all groups: bool [B] from [K, B]."""
    return torch.isfinite(squared_bounds).all(dim=0)
