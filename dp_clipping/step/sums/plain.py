"""Norms, coefficients and sums in plain PyTorch, parameter by parameter.

`Uses` joins what several uses of a parameter leave, so that cross terms of these are in the norm:
for steps on kernels too. Products with one weight are more tokens of one product, and look-ups in
it more tokens of one look-up: factors are laid side by side. A weight with both, as that of an
embedding and of the head of a language model, has both (`TiedFactors`). Any other use adds its G.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import (
    ACCUMULATED,
    Weights,
    accumulation_dtype,
    full_float32,
    only,
    squared_norms,
    stored_dtype,
    weighted_sum,
)
from dp_clipping.clipping.coefficients import coefficients, finite_samples
from dp_clipping.layers.embedding.module import EmbeddingFactors
from dp_clipping.layers.embedding.tied import TiedFactors
from dp_clipping.layers.handle import Site
from dp_clipping.layers.norm import plain_gradients
from dp_clipping.layers.projection import Linear, LinearFactors, gradients_of
from dp_clipping.layers.recorder import (
    DENSE,
    FACTORS,
    LINEAR,
    NORMALIZED,
    Accumulate,
    Joint,
    Left,
    Summand,
    Trainable,
)
from dp_clipping.profiling.profile import NOTHING
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums.work import Work
from dp_clipping.torch_compat import version_of

Pair = tuple[Tensor, Tensor]
SMALL = 1 << 15  # values of G, up to which several are copied to one tensor, and computed at once


class Plain(Work):
    """The work of one batch in PyTorch."""

    fused = False

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        super().begin(losses, clip_norms, accumulate)
        self._good: Tensor | None = None  # samples whose norms are finite, if some are not
        self._weights: list[Weights] = []

    def take_norms(self, lefts: list[Left], everything: bool) -> None:
        alike: dict[tuple, list[tuple[Trainable, Tensor]]] = {}  # biases, scales and other short G
        alone: dict[torch.dtype, list[tuple[Trainable, Tensor]]] = {}  # squared norms [B]
        dense: list[tuple[Trainable, Tensor]] = []
        table, label = self.norms.table, self._label
        with full_float32():
            for record, value, left in self._each(lefts):
                if isinstance(value, Tensor):
                    dense.append((record, value))
                    if value.ndim <= 2 or value.numel() <= SMALL:
                        alike.setdefault((value.shape, value.dtype), []).append((record, value))
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
            for mine in alike.values():
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
                (y, a), site = left.tensors, value
                if y.ndim != 3 or site.layout is not None:
                    y, a = site.tokens(y, a, self.batch_size)
                tokens, outputs, inputs = y.shape[1], y.shape[2], a.shape[2]
                is_smaller = tokens * (outputs + inputs) < outputs * inputs
                if site.weight is not None and (self.two_passes or is_smaller):
                    found.append((site.weight, LinearFactors(a, y, site.transposed), left))
                    records = records[1:]
                own = gradients_of_tokens(records, y, a, site)
            else:
                own = gradients_left(kind, records, value, left.tensors, self.batch_size)
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
        label = self._label
        together: dict[tuple[int, torch.dtype], list[int]] = {}  # numbers of small ones
        for n, (record, value) in enumerate(zip(records, values, strict=True)):
            if isinstance(value, Tensor) and value.numel() <= SMALL:
                together.setdefault((record.group, value.dtype), []).append(n)
        found: dict[int, Tensor] = {}
        for (group, _), numbers in together.items():
            with NOTHING if label is None else label("sum", [records[n] for n in numbers]):
                own = [values[n] for n in numbers]
                sizes = [g.shape[1:].numel() for g in own]
                rows = [g.reshape(g.shape[0], size) for g, size in zip(own, sizes, strict=True)]
                total = weighted_sum(self._weights[group], torch.cat(rows, 1))
                # Not as views, whose versions would be those of all together.
                parts = torch.unsafe_split_with_sizes(total, sizes)
                found.update(zip(numbers, parts, strict=True))
                del own, rows, parts
        values.reverse()
        for n, record in enumerate(records):
            weights, value = self._weights[record.group], values.pop()
            if n in found:
                yield found.pop(n)
                continue
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


class Uses:
    """Collects what each use leaves of parameters that have several.

    Args:
        versions: refuses what has changed since it arrived, a `backward_state.Kept`.
    """

    def __init__(self, batch_size: int, versions: Any):
        self._batch_size, self.versions = batch_size, versions
        self._products: dict[Trainable, list[Pair]] = {}  # [B, T, d], [B, T, p]
        self._look_ups: dict[Trainable, list[Pair]] = {}  # ids [B, S], [B, S, p]
        self._noted: dict[Trainable, list[tuple[tuple[Tensor, ...], tuple[int, ...]]]] = {}
        self._gradients: dict[Trainable, tuple[Tensor, bool]] = {}  # G, and if it is nobody else's

    def gradients(
        self, kind: str, records: tuple[Trainable, ...], value: Any, tensors: tuple[Tensor, ...]
    ) -> list[tuple[Trainable, Tensor]]:
        """Returns G of some parameters, that one use leaves."""
        return gradients_left(kind, records, value, tensors, self._batch_size)

    def add(
        self, kind: str, records: tuple[Trainable, ...], value: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Adds what one use leaves; see `layers.recorder`."""
        if kind is LINEAR:
            y, a = value.tokens(*tensors, self._batch_size)
            weight = value.weight
            if weight is not None and weight in weight.joint.factored:
                pair = (a, y) if value.transposed else (y, a)
                self._note(self._products, weight, pair, tensors)
                records = tuple([record for record in records if record is not weight])
        elif kind is FACTORS and records[0] in records[0].joint.factored and value.samples is None:
            self._note(self._look_ups, records[0], (value.ids, value.y), tensors)
            return
        for record, gradients in self.gradients(kind, records, value, tensors):
            self._add(record, gradients, kind is not DENSE)

    def _note(
        self, factors: dict[Trainable, list[Pair]], record: Trainable, pair: Pair,
        tensors: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        factors.setdefault(record, []).append(pair)
        noted = tensors, tuple(map(version_of, tensors))
        self._noted.setdefault(record, []).append(noted)

    def _add(self, record: Trainable, gradients: Tensor, is_own: bool) -> None:
        if record in self._gradients:
            total, may_change = self._gradients[record]
            gradients = gradients.to(total.dtype)
            gradients, is_own = total.add_(gradients) if may_change else total + gradients, True
        self._gradients[record] = gradients, is_own

    def joined(self, joint: Joint) -> Iterator[tuple[Any, ...]]:
        """Yields what all uses of each parameter have left together: the arguments of `Work.take`.

        Raises:
            RuntimeError: a tensor of a use has changed since it arrived.
        """
        for record in joint.records:
            products, look_ups = self._products.pop(record, []), self._look_ups.pop(record, [])
            noted = self._noted.pop(record, [])
            self.versions.refuse_changed([((record,), *one) for one in noted], values=False)
            if record not in self._gradients:
                if look_ups and not (products and _exceed(products, record.shape)):
                    factors: Any = EmbeddingFactors(*side_by_side(look_ups), record.shape[0])
                    if products:
                        left, right = side_by_side(products)
                        factors = TiedFactors(LinearFactors(right, left, False), factors)
                    yield FACTORS, (record,), factors, factors.held(factors)
                    continue
                if products and not look_ups and record in joint.linear:
                    left, right = side_by_side(products)
                    yield LINEAR, (record,), Site(Linear, record), (left, right)
                    continue
            # Others have left G, as compiled code does, G is smaller than the factors, or the
            # products are in no plan.
            for left, right in products:
                self._add(record, gradients_of(left, right), True)
            if record not in self._gradients:
                continue
            total, is_own = self._gradients.pop(record)
            if look_ups:
                total = total if is_own else total.clone()
                EmbeddingFactors(*side_by_side(look_ups), record.shape[0]).add_to(total)
            yield DENSE, (record,), None, (total,)


def _exceed(products: list[Pair], shape: torch.Size) -> bool:
    """Returns whether the factors of products are larger than G [B, *shape]."""
    tokens = sum([left.shape[1] for left, _ in products])
    return tokens * sum(shape) > shape.numel()


def side_by_side(factors: list[Pair]) -> Pair:
    """Returns the factors of several uses as those of one with all their tokens."""
    if len(factors) == 1:  # which is not copied
        return factors[0]
    left, right = (torch.cat(own, 1) for own in zip(*factors, strict=True))
    return left, right


def gradients_of_tokens(
    records: tuple[Trainable, ...], y: Tensor, a: Tensor, site: Site
) -> list[tuple[Trainable, Tensor]]:
    """Returns G of a linear layer's weight and bias, of y [B, T, d] and a [B, T, p]."""
    found = []
    for record in records:
        if record is site.bias:
            found.append((record, y.sum(1, dtype=ACCUMULATED.get(y.dtype, torch.float32))))
        else:
            found.append((record, gradients_of(a, y) if site.transposed else gradients_of(y, a)))
    return found


def gradients_left(
    kind: str, records: tuple[Trainable, ...], value: Any, tensors: tuple[Tensor, ...],
    batch_size: int,
) -> list[tuple[Trainable, Tensor]]:  # fmt: skip
    """Returns G of some parameters that a use has left something for."""
    if kind is LINEAR:
        y, a = value.tokens(*tensors, batch_size)
        return gradients_of_tokens(records, y, a, value)
    if kind is NORMALIZED:
        use, own = value
        formed = plain_gradients(use, accumulation_dtype(use.x.dtype))
        return [
            (record, gradients.view(batch_size, *record.shape))
            for record, gradients in zip(own, formed, strict=True)
            if record is not None
        ]
    if kind is DENSE:
        return list(zip(records, tensors, strict=True))
    return [(records[0], value.dense().to(stored_dtype(value.y.dtype)))]
