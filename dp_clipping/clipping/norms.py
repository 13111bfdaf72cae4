"""Computes the norms of a step: noted by parameter, evaluated for all parameters together.

A network has hundreds of parameters, and arithmetic on [B] numbers costs a launch each. So backward
notes two numbers per sample and parameter, and the rest is computed on [P, B] tables.

**Underflow.** A float32 square or product below τ = 2⁻¹²⁶ may be computed as zero (some devices
keep numbers down to 2⁻¹⁴⁹). What it does depends on how a squared norm is formed:

- From G itself (`per_sample`, accumulated, embeddings, norm layers, biases, vmap): N squares lose
  at most N·τ of n². This is negligible beside any C that is allowed. The sum has the same
  underflow of G itself, because the norm is that of the summed values.
- As ‖a‖²‖y‖², of one token: a lost ‖y‖² of 1e-45 times ‖a‖² of 1e38 is 1e-7. So both norms are
  taken in float64, and multiplied before they are squared (`accumulation.product_squares`).
- From Gram matrices: an entry y_t·y_s of d features loses at most d·τ, and is multiplied with an
  entry of the other matrix, at most ‖a_t‖‖a_s‖. Over all t and s n² loses at most (Σ_t ‖a_t‖)²·d·τ,
  and (Σ_t ‖y_t‖)²·p·τ by the other matrix. An error that is allowed for already is ε·S², ε = 2⁻¹⁶,
  so it is S that is made larger:

      S = Σ_t (‖a_t‖ + u√(pτ)) (‖y_t‖ + u√(dτ)),   u = 2⁹ ≥ 2/√ε

  whose square has (Σ_t ‖a_t‖)²·u²·d·τ in it, and the norms of tokens that have themselves vanished.
  Of tokens of norm 1e-8 and more this changes no digit of S.

Overflow is harmless: it gives an infinity or NaN, and that sample contributes nothing. Between, a
product of a lost and an infinite factor is NaN, which is not finite either. Coefficients are
float32 numbers from 1e-30 on, and c·y that is rounded coarsely because it is below τ moves a
product with ‖a‖ < 1.8e19 by less than 1e-25.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

UNDERFLOW = 2.0**9  # u above
# Relative to S², what the rounding of two 16-bit Gram matrices and of their product may be: chains
# of GRAM_PIECE products, 16 of them at a time in a matrix unit, which cuts off and does not round.
GRAM_ROUNDING = 2.0**-16
GRAM_PIECE = 512


@dataclass(slots=True)
class Norm:
    """‖G_i‖² of one parameter as computed, with a bound of its rounding error.

    Attributes:
        squared: [B] float32 (float64); a Gram product of tokens that cancel may be below 0.
        scale: S = Σ_t ‖a_t‖‖y_t‖ [B], what errors are relative to; None where there are none.
        gram_error: the rounding error of `squared`, relative to S².
        sum_error: the rounding error of the norm of what will be summed, relative to S.
    """

    squared: Tensor
    scale: Tensor | None = None
    gram_error: float = 0.0
    sum_error: float = 0.0


class Norms:
    """Norms by parameter (a `layers.recorder.Trainable`), added up over clipping groups.

    Args:
        count: K, the number of clipping groups.
        zero: [B] zeros, of the dtype and device of the results.
        part: a range for `norm_stack` and for `norm_local_sum`, of a step that is timed.
    """

    def __init__(
        self,
        count: int,
        zero: Tensor,
        part: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self._count, self._zero, self._part = count, zero, part
        self._of: dict[Any, Norm] = {}

    def add(self, parameter: Any, norm: Norm) -> None:
        self._of[parameter] = norm

    def update(self, norms: Mapping[Any, Norm]) -> None:
        """Adds several."""
        self._of.update(norms)

    def only(self, parameters: set[Any]) -> "Norms":
        """Returns the norms of some parameters."""
        part = copy(self)
        part._of = {p: norm for p, norm in self._of.items() if p in parameters}
        return part

    def squared(self) -> Tensor:
        """Returns squared norms of each group: [K, B]."""
        return self._by_group(self._stack())

    def bounds(self) -> Tensor:
        """Returns upper bounds of the squared norms of what will be summed: [K, B]."""
        squared = self._stack()
        norms = self._of.values()
        scale = torch.stack(
            [self._zero if n.scale is None else n.scale for n in norms] or [self._zero]
        )
        errors = tuple((n.gram_error, n.sum_error) for n in norms) or ((0.0, 0.0),)
        table = on_device(errors, scale.dtype, scale.device)
        gram_error, sum_error = table[:, :1], table[:, 1:]
        bound = (squared + gram_error * scale.square()).sqrt() + sum_error * scale
        return self._by_group(bound.square())

    def _stack(self) -> Tensor:
        """Returns [P, B], one row of zeros if there is no parameter.

        What rounding has left below 0 is 0; minus infinity is no norm to clip by.
        """
        with self._part("norm_stack"):
            squared = torch.stack([norm.squared for norm in self._of.values()] or [self._zero])
            return torch.where(squared == -torch.inf, torch.inf, squared).clamp_min(0)

    def _by_group(self, values: Tensor) -> Tensor:
        with self._part("norm_local_sum"):
            if self._count == 1:
                return values.sum(0, keepdim=True)
            numbers = tuple(p.group for p in self._of) or (0,)
            index = on_device(numbers, torch.int64, values.device)
            total = values.new_zeros(self._count, values.shape[1])
            return total.index_add_(0, index, values)


@cache  # for good: CUDA graphs read them, and there are few
def on_device(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor that is cached: a copy to a GPU would make the host wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)
