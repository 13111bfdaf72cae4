"""Compares the gradients of a network with right ones."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_error(
    gradients: Sequence[Tensor], expected: Sequence[Tensor]
) -> tuple[float, int, float]:
    """Returns max over parameters of ‖g − r‖ / (‖r‖ + 1e-3 · ‖all r‖), its number, and ‖g‖ / ‖r‖.

    The error is infinite for NaN. The second term keeps a parameter whose gradient is nearly zero
    from being judged by rounding.
    """
    norms = torch.stack([r.norm() for r in expected])
    differences = torch.stack([(g - r).norm() for g, r in zip(gradients, expected, strict=True)])
    errors = (differences / (norms + 1e-3 * norms.norm())).nan_to_num(nan=torch.inf)
    number = int(errors.argmax())
    ratio = gradients[number].norm() / norms[number]
    return errors[number].item(), number, ratio.item()
