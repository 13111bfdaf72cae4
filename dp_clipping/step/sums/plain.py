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
from dp_clipping.layers.recorder import FACTORS, LINEAR, Left, Summand, Trainable
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.step.context import StepContext
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums.uses import gradients_left, gradients_of_tokens


class Plain:
    """The arithmetic of one batch in PyTorch; see `work.Arithmetic`.

    Args:
        context: what all steps of the model have in common.
        batch_size: samples of the batch.
        padding: [B] bool, True for rows that are padding; None: no row is.
    """

    fused = False

    def __init__(self, context: StepContext, batch_size: int, padding: Tensor | None = None):
        self.context, self.batch_size, self.padding = context, batch_size, padding
        self._timer = context.timer

    def begin(self, losses: Tensor, clip_norms: Tensor, streams: bool) -> None:
        self._clip_norms = clip_norms
        # Labels work by layers, if that is recorded or timed.
        self._label: Any = self._timer.layers if self._timer.labels_layers() else None
        self._good: Tensor | None = None  # samples whose norms are finite, if some are not
        self._weights: list[Weights] = []

    # ---- norms ----------------------------------------------------------------------------------

    def norms(self, lefts: list[Left], work: Any, _everything: bool) -> None:
        vectors: dict[tuple, list[tuple[Trainable, Tensor]]] = {}
        alone: dict[torch.dtype, list[tuple[Trainable, Tensor]]] = {}  # squared norms [B]
        dense: list[tuple[Trainable, Tensor | None]] = []
        two_passes, label = self.context.policy.two_passes, self._label
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
                    work.norms.table.add(record, norm)
                    work.norms.known.add(record)
                if not two_passes:
                    work.kept[record] = (value, left.tensors, left.versions)
            for mine in vectors.values():
                records, rows = zip(*mine, strict=True)
                with NOTHING if label is None else label("norm/dense", records):
                    squares = squared_norms(torch.cat(rows)).view(len(mine), -1)
                work.found(records, squares)
        for several in alone.values():
            records, own_squares = zip(*several, strict=True)
            work.found(records, torch.stack(own_squares))
        if two_passes:
            work.recomputed += [one for left in lefts for one in left.records]
        else:
            work.keep_gradients(dense)

    def _each(self, lefts: list[Left]) -> list[tuple[Trainable, Any, Left]]:
        """Returns G or factors of each parameter, with what they are of.

        Of a linear layer's weight that is the smaller of both, and factors where nothing is kept.
        """
        found: list[tuple[Trainable, Any, Left]] = []
        two_passes = self.context.policy.two_passes
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
                if site.weight is not None and (two_passes or is_smaller):
                    found.append((site.weight, LinearFactors(a, y, site.transposed), left))
                    records = records[1:]
                own = gradients_of_tokens(records, y, a, site)
            else:
                own = gradients_left(kind, records, value, self.batch_size)
            found += [(record, gradients, left) for record, gradients in own]
        return found

    # ---- coefficients ---------------------------------------------------------------------------

    def clip(self, work: Any, groups: list[int]) -> BatchNorms:
        squared, bounds = work.norms.squares_and_bounds()
        policy = self.context.policy
        scale = coefficients(bounds, self._clip_norms, policy.clipping_function, policy.gamma)
        # One look from the host: a product with zero would not keep NaN out of the sum.
        finite, nonfinite = finite_samples(bounds), 0
        if not bool(finite.all()):
            self._good = finite
            nonfinite = int((~finite).sum())
            for record, (value, *_) in work.kept.items():
                self._replace(work, record, self._only_good(value))
        if self.padding is not None:  # values that are not left out are finite, and c is 0
            scale = scale.masked_fill(self.padding, 0.0)
            nonfinite = nonfinite and int((~finite & ~self.padding).sum())
        self._weights = list(map(Weights, scale))
        return BatchNorms(squared.sum(0).sqrt(), squared, nonfinite)

    def _replace(self, work: Any, record: Trainable, value: Any) -> None:
        work.keep(record, value, (value,) if isinstance(value, Tensor) else value.held(value))

    # ---- sums -----------------------------------------------------------------------------------

    def summands(
        self, lefts: list[Left], taken: set[Trainable]
    ) -> tuple[list[Trainable], list[Summand]]:
        """Returns what a second backward has left for the sums of parameters not `taken` yet."""
        found = [
            (record, (self._only_good(value), left.tensors, left.versions))
            for record, value, left in self._each(lefts)
            if record not in taken
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
