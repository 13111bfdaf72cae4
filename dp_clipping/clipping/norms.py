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

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

UNDERFLOW = 2.0**9  # u above
LOST = UNDERFLOW * torch.finfo(torch.float32).tiny ** 0.5  # u√τ
# Relative to S², what the rounding of two 16-bit Gram matrices and of their product may be: chains
# of GRAM_PIECE products, 16 of them at a time in a matrix unit, which cuts off and does not round.
GRAM_ROUNDING = 2.0**-16
GRAM_PIECE = 512


def new_tensor(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


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
    """Norms of several parameters (`layers.recorder.Trainable`), added up over clipping groups.

    Launches leave the squared norms of many parameters in one tensor, so rows are kept in blocks.

    Args:
        count: K, the number of clipping groups.
        zero: [B] zeros, of the dtype and device of the results.
        part: a range for `norm_stack` and for `norm_local_sum`, of a step that is timed.
        tensor: makes a tensor of values, its dtype and its device; one that is kept is no copy to a
            GPU, for which the host would wait.

    Attributes:
        is_exact: no norm has a rounding error to allow for.
        known: parameters whose norm is in it: a row may be that of several parameters together.
    """

    def __init__(
        self,
        count: int,
        zero: Tensor,
        part: Callable[[str], AbstractContextManager] = nullcontext,
        tensor: Callable[[tuple, torch.dtype, torch.device], Tensor] = new_tensor,
    ):
        self._count, self._zero, self._part, self._tensor = count, zero, part, tensor
        self._records: list[Any] = []
        self._errors: list[tuple[float, float]] = []  # of each row, as `Norm` has them
        self._blocks: list[tuple[Tensor, Tensor | None]] = []  # squares and scales [n, B]
        self.is_exact = True
        self.known: set[Any] = set()

    def add(self, record: Any, norm: Norm) -> None:
        """Adds the norm of one parameter."""
        scales = None if norm.scale is None else norm.scale[None]
        self.add_rows([record], norm.squared[None], scales, norm.gram_error, norm.sum_error)

    def add_rows(
        self, records: Sequence[Any], squares: Tensor, scales: Tensor | None = None,
        gram_error: float = 0.0, sum_error: float = 0.0,
    ) -> None:  # fmt: skip
        """Adds squared norms [n, B] of n parameters; the rest is as in `Norm`, for all of them."""
        self._records += records
        self.known.update(records)
        self._errors += [(gram_error, sum_error)] * len(records)
        self._blocks.append((squares, scales))
        self.is_exact = self.is_exact and scales is None

    def only(self, records: Container[Any]) -> "Norms":
        """Returns the norms of some parameters."""
        squares, scales = self._stacked()
        part = Norms(self._count, self._zero.to(squares.dtype), self._part, self._tensor)
        rows = [n for n, one in enumerate(self._records) if one in records]
        if rows:
            index = self._tensor(tuple(rows), torch.int64, squares.device)
            part._records = [self._records[n] for n in rows]
            part._errors = [self._errors[n] for n in rows]
            part._blocks = [(squares[index], None if scales is None else scales[index])]
        return part

    def leave_out_unless(self, good: Tensor) -> None:
        """Makes the first norm infinite where `good`, one bool, is not True."""
        squares, scales = self._blocks[0]
        self._blocks[0] = squares.where(good, torch.inf), scales

    def rows(
        self, groups: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None, tuple[tuple[float, float], ...], tuple[int, ...]]:
        """Returns squares and scales [P, B], errors, and where the rows of each group begin.

        Args:
            groups: clipping groups, in whose order rows come; None: there is one.
        """
        squares, scales = self._stacked()
        errors = tuple(self._errors) or ((0.0, 0.0),)
        if groups is None or self._count == 1:
            return squares, scales, errors, (0, len(errors))
        of_group: dict[int, list[int]] = {group: [] for group in groups}
        for n, one in enumerate(self._records):
            if one.group in of_group:
                of_group[one.group].append(n)
        order = tuple(n for own in of_group.values() for n in own)
        starts = tuple(accumulate(map(len, of_group.values()), initial=0))
        if order != tuple(range(len(squares))):
            index = self._tensor(order, torch.int64, squares.device)
            squares, scales = squares[index], None if scales is None else scales[index]
        return squares, scales, tuple(errors[n] for n in order), starts

    def squared(self) -> Tensor:
        """Returns squared norms of each group: [K, B]."""
        return self._by_group(self._not_negative())

    def of_each(self, records: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Returns squared norms of each parameter, and of what is taken together: [n + 1, B].

        Gram matrices of layers with one input are multiplied together, and that may be another
        choice of layers on another rank: what they have taken is added up in the last row. The
        second result is 1 for each parameter whose norm is in its own row, else 0: [n + 1].
        """
        places = {record: place for place, record in enumerate(records)}
        part = self.only(places)
        values = part._not_negative()
        kinds = zip(part._records, part._errors, strict=False)
        rows = tuple([len(records) if error else places[one] for one, (error, _) in kinds])
        index = self._tensor(rows or (len(records),), torch.int64, values.device)
        total = values.new_zeros(len(records) + 1, values.shape[1])
        own = values.new_zeros(len(total)).index_fill_(0, index, 1)
        own[-1] = 0
        return total.index_add_(0, index, values), own

    def bounds(self) -> Tensor:
        """Returns upper bounds of the squared norms of what will be summed: [K, B]."""
        bound = self._not_negative()
        _, scales = self._stacked()
        if scales is not None:
            table = self._tensor(tuple(self._errors), scales.dtype, scales.device)
            gram_error, sum_error = table[:, :1], table[:, 1:]
            bound = ((bound + gram_error * scales.square()).sqrt() + sum_error * scales).square()
        return self._by_group(bound)

    def _stacked(self) -> tuple[Tensor, Tensor | None]:
        """Returns squares and scales [P, B]: a row of zeros if there is no parameter."""
        blocks = self._blocks
        if not blocks:
            return self._zero[None], None
        if len(blocks) > 1:
            squares, scales = torch.cat([own for own, _ in blocks]), None
            if not self.is_exact:
                every = [torch.zeros_like(x) if s is None else s for x, s in blocks]
                scales = torch.cat(every)
            self._blocks = [(squares, scales)]
        return self._blocks[0]

    def _not_negative(self) -> Tensor:
        """Returns squares [P, B].

        What rounding has left below 0 is 0; minus infinity is no norm to clip by.
        """
        with self._part("norm_stack"):
            squares, _ = self._stacked()
            return torch.where(squares == -torch.inf, torch.inf, squares).clamp_min(0)

    def _by_group(self, values: Tensor) -> Tensor:
        with self._part("norm_local_sum"):
            if self._count == 1:
                return values.sum(0, keepdim=True)
            numbers = tuple([one.group for one in self._records]) or (0,)
            index = self._tensor(numbers, torch.int64, values.device)
            total = values.new_zeros(self._count, values.shape[1])
            return total.index_add_(0, index, values)
