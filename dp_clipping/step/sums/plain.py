"""Norms, coefficients and sums in plain PyTorch, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import (
    Weights,
    full_float32,
    only,
    squared_norms,
    weighted_sum,
)
from dp_clipping.clipping.coefficients import coefficients, finite_samples
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.recorder import FACTORS, LINEAR, Accumulate, Left, Summand, Trainable
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums.uses import gradients_left, gradients_of_tokens
from dp_clipping.step.sums.work import Work


class Plain(Work):
    """The work of one batch in PyTorch."""

    fused = False

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        super().begin(losses, clip_norms, accumulate)
        self._good: Tensor | None = None  # samples whose norms are finite, if some are not
        self._weights: list[Weights] = []

    def take_norms(self, lefts: list[Left], everything: bool) -> None:
        vectors: dict[tuple, list[tuple[Trainable, Tensor]]] = {}
        alone: dict[torch.dtype, list[tuple[Trainable, Tensor]]] = {}  # squared norms [B]
        dense: list[tuple[Trainable, Tensor]] = []
        table, label = self.norms.table, self._label
        with full_float32():
            for record, value, left in self._each(lefts):
                if isinstance(value, Tensor):
                    dense.append((record, value))
                    if value.ndim <= 2:
                        vectors.setdefault((value.shape, value.dtype), []).append((record, value))
                        continue
                    with NOTHING if label is None else label("norm/dense", (record,)):
                        own = squared_norms(value)
                    alone.setdefault(own.dtype, []).append((record, own))
                    continue
                with NOTHING if label is None else label("norm/factors", (record,)):
                    norm = value.norm()
                if norm.scale is None:
                    alone.setdefault(norm.squared.dtype, []).append((record, norm.squared))
                else:
                    table.add(record, norm)
                if not self.two_passes:
                    self.kept[record] = (value, left.tensors, left.versions)
            for mine in vectors.values():
                records, rows = zip(*mine, strict=True)
                with NOTHING if label is None else label("norm/dense", records):
                    squares = squared_norms(torch.cat(rows)).view(len(mine), -1)
                table.add_rows(records, squares)
        for several in alone.values():
            records, own_squares = zip(*several, strict=True)
            table.add_rows(records, torch.stack(own_squares))
        if self.two_passes:
            self.recomputed += [one for left in lefts for one in left.records]
        else:
            self.keep(dense)

    def _each(self, lefts: list[Left]) -> list[tuple[Trainable, Any, Left]]:
        """Returns G or factors of each parameter, with what they are of.

        Of a linear layer's weight that is the smaller of both, and factors where nothing is kept.
        """
        found: list[tuple[Trainable, Any, Left]] = []
        for left in lefts:
            kind, records, value = left.kind, left.records, left.value
            if kind is FACTORS:
                found.append((records[0], value, left))
                continue
            if kind is LINEAR:
                y, a, site = value
                if y.ndim != 3 or site.layout is not None:
                    y, a = site.tokens(y, a, self.batch_size)
                tokens, outputs, inputs = y.shape[1], y.shape[2], a.shape[2]
                is_smaller = tokens * (outputs + inputs) < outputs * inputs
                if site.weight is not None and (self.two_passes or is_smaller):
                    found.append((site.weight, LinearFactors(a, y, site.transposed), left))
                    records = records[1:]
                own = gradients_of_tokens(records, y, a, site)
            else:
                own = gradients_left(kind, records, value, self.batch_size)
            found += [(record, gradients, left) for record, gradients in own]
        return found

    def set_coefficients(self, groups: list[int]) -> BatchNorms:
        squared, bounds = self.norms.squares_and_bounds()
        policy = self.context.policy
        scale = coefficients(bounds, self.clip_norms, policy.clipping_function, policy.gamma)
        # One look from the host: a product with zero would not keep NaN out of the sum.
        finite, nonfinite = finite_samples(bounds), 0
        if not bool(finite.all()):
            self._good = finite
            nonfinite = int((~finite).sum())
            self.keep([(one, self._only_good(kept[0])) for one, kept in self.kept.items()])
        if self.padding is not None:  # values that are not left out are finite, and c is 0
            scale = scale.masked_fill(self.padding, 0.0)
            nonfinite = nonfinite and int((~finite & ~self.padding).sum())
        self._weights = list(map(Weights, scale))
        return BatchNorms(squared.sum(0).sqrt(), squared, nonfinite)

    def summands(self, lefts: list[Left]) -> tuple[list[Trainable], list[Summand]]:
        found = [
            (record, (self._only_good(value), left.tensors, left.versions))
            for record, value, left in self._each(lefts)
            if record not in self.taken
        ]
        return [record for record, _ in found], [summand for _, summand in found]

    def sums(self, records: Sequence[Trainable], values: list[Any]) -> Iterator[Tensor]:
        """Yields Σ_i c_i G_i of each parameter, in float32 (float64), each when it is asked for.

        To be called, and asked, within `full_float32`.

        Args:
            values: G [B, *parameter], or factors.
        """
        values.reverse()
        label = self._label
        for record in records:
            weights, value = self._weights[record.group], values.pop()
            with NOTHING if label is None else label("sum", (record,)):
                if isinstance(value, Tensor):
                    total = weighted_sum(weights, value)
                else:
                    total = value.weighted_sum(weights)
            del value
            yield total

    def _only_good(self, value: Any) -> Any:
        """Returns the same with zeros for samples that are left out."""
        if self._good is None:
            return value
        return only(value, self._good) if isinstance(value, Tensor) else value.only(self._good)
