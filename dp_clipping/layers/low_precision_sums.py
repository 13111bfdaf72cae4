"""Weighted sums of 16-bit factors by one product, with every contribution still at most C.

Σ_i c_i G_i of a linear layer is one matrix product once its output gradients are y'_it = c_i y_it.
In 16 bit y' is rounded, and tokens that cancel can make the rounding larger than what is left: a
contribution of C would come out as 1.002 C, or 1.03 C. So the rounded values themselves are normed:

1. y' = round(c_i (1 - η) y_it) in place, exactly y_it where c_i = 1;
2. the norm of what will be summed, from the Gram matrix of y' and that of the activations;
3. a sample that still exceeds its threshold is divided by the power of two that brings it below,
   which rounds nothing but subnormal float16: so it is normed again, until none exceeds.

η is a fifth more than rounding all entries up to bfloat16 can add to a norm where tokens do not
cancel. So step 3 changes nothing there, and a sample contributes at least (1 - η)(1 - 2⁻⁸) = 0.991
of what its coefficient allows.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.coefficients import MARGIN
from dp_clipping.clipping.norms import Norms
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.recorder import Trainable
from dp_clipping.torch_compat import scale_each_

ROUNDING_SLACK = 1.2 * 2.0**-8


def rescale(
    factors: dict[Trainable, LinearFactors],
    saved: dict[Trainable, Any],
    others: Norms,
    coefficients: Tensor,
    clip_norms: Tensor,
    counted: Container[Trainable],
    over_parts: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scales 16-bit linear factors in place, so that summing them without weights is safe.

    Args:
        factors: those that are scaled.
        saved: what each parameter left, of the samples whose coefficients are given.
        others: norms of all other parameters, of the same samples.
        coefficients: [K, B] float32.
        clip_norms: [K] thresholds C_k.
        counted: parameters whose norms this rank adds; `others` has no norms of different ones.
        over_parts: sums bounds [K, B] over ranks that have other parts of the parameters.

    Returns:
        The coefficients that hold for the other parameters [K, B].
    """
    scale = torch.where(coefficients < 1, coefficients * (1 - ROUNDING_SLACK), coefficients)
    if not scale.shape[1]:
        return scale
    _own_storage(factors, saved)
    by_host = scale.tolist()
    done: set[int] = set()
    for parameter, one in factors.items():
        if one.y.data_ptr() not in done:
            done.add(one.y.data_ptr())
            _scale_rows(one.y, by_host[parameter.group])
    while True:
        scaled = others.only(set())
        for parameter, one in factors.items():
            if parameter in counted:
                scaled.add(parameter, one.norm())
        bounds = over_parts(scale.square() * others.bounds() + scaled.bounds())
        excess = bounds.sqrt() * (1 + MARGIN[torch.float32]) / clip_norms.to(bounds)[:, None]
        if not bool((excess > 1).any()):
            break
        halved = torch.exp2(-excess.clamp_min(1).log2().ceil())
        for parameter, one in factors.items():
            one.y = one.y * halved[parameter.group, :, None, None].to(one.y.dtype)
        scale = scale * halved
    for one in factors.values():
        one.is_scaled = True
    return scale


def _scale_rows(y: Tensor, coefficients: list[float]) -> None:
    """Scales y_i by c_i in place, rounded once: on CPUs torch would round c_i to y's dtype."""
    if y.is_cuda:
        scale_each_(list(y.unbind(0)), coefficients)
        return
    for row, c in zip(y.unbind(0), coefficients, strict=True):
        row.copy_(row.float() * c)


def _own_storage(
    factors: dict[Trainable, LinearFactors],
    saved: dict[Trainable, Any],
) -> None:
    """Copies output gradients that layers share: they may be scaled once, by one coefficient.

    Layers whose outputs are added have one output gradient, the very same tensor.
    """
    seen: dict[int, tuple | None] = {
        one.untyped_storage().data_ptr(): None for one in saved.values() if isinstance(one, Tensor)
    }
    for parameter, one in saved.items():
        if isinstance(one, Tensor):
            continue
        y = one.y
        storage = y.untyped_storage().data_ptr()
        use = (parameter.group, y.data_ptr(), y.shape, y.stride(), parameter in factors)
        if seen.setdefault(storage, use) != use or 0 in y.stride():
            one.y = y.clone(memory_format=torch.contiguous_format)
