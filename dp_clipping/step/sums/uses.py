"""Joins what several uses of parameters leave, so that cross terms of these are in the norm.

Products with one weight are more tokens of one product, and look-ups in it more tokens of one
look-up: factors are laid side by side. A weight with both, as that of an embedding and of the head
of a language model, has both (`TiedFactors`). Any other use adds its G.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import ACCUMULATED, accumulation_dtype, stored_dtype
from dp_clipping.layers.embedding.module import EmbeddingFactors, TiedFactors
from dp_clipping.layers.handle import Site
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.norm import plain_gradients
from dp_clipping.layers.projection import Linear, gradients_of
from dp_clipping.layers.recorder import DENSE, FACTORS, LINEAR, NORMALIZED, Joint, Trainable
from dp_clipping.torch_compat import version_of

Left = tuple[str, tuple[Trainable, ...], Any, tuple[Tensor, ...]]
"""The arguments of `Work.take`."""
Pair = tuple[Tensor, Tensor]


class Uses:
    """Collects what each use leaves of parameters that have several.

    Args:
        versions: refuses what has changed since it arrived, a `capture.checks.kept.Kept`.
    """

    def __init__(self, batch_size: int, versions: Any):
        self._batch_size, self.versions = batch_size, versions
        self.forget()

    def gradients(
        self, kind: str, records: tuple[Trainable, ...], value: Any
    ) -> list[tuple[Trainable, Tensor]]:
        """Returns G of some parameters, that one use leaves."""
        return gradients_left(kind, records, value, self._batch_size)

    def forget(self) -> None:
        self._products: dict[Trainable, list[Pair]] = {}  # [B, T, d], [B, T, p]
        self._look_ups: dict[Trainable, list[Pair]] = {}  # ids [B, S], [B, S, p]
        self._noted: dict[Trainable, list[tuple[tuple[Tensor, ...], tuple[int, ...]]]] = {}
        self._gradients: dict[Trainable, tuple[Tensor, bool]] = {}  # G, and if it is nobody else's

    def add(
        self, kind: str, records: tuple[Trainable, ...], value: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Adds what one use leaves; see `layers.recorder`."""
        if kind is LINEAR:
            y, a = value[2].tokens(value[0], value[1], self._batch_size)
            weight = value[2].weight
            if weight is not None and weight in weight.joint.factored:
                pair = (a, y) if value[2].transposed else (y, a)
                self._note(self._products, weight, pair, tensors)
                records = tuple([record for record in records if record is not weight])
        elif kind is FACTORS and records[0] in records[0].joint.factored and value.samples is None:
            self._note(self._look_ups, records[0], (value.ids, value.y), tensors)
            return
        for record, gradients in self.gradients(kind, records, value):
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

    def joined(self, joint: Joint) -> Iterator[Left]:
        """Yields what all uses of each parameter have left together.

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
                    yield LINEAR, (record,), (left, right, Site(Linear, record)), (left, right)
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
            yield DENSE, (record,), (total, None), (total,)


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
    kind: str, records: tuple[Trainable, ...], value: Any, batch_size: int
) -> list[tuple[Trainable, Tensor]]:
    """Returns G of some parameters that a use has left something for."""
    if kind is LINEAR:
        y, a, site = value
        y, a = site.tokens(y, a, batch_size)
        return gradients_of_tokens(records, y, a, site)
    if kind is NORMALIZED:
        use, own = value
        formed = plain_gradients(use, accumulation_dtype(use.x.dtype))
        return [
            (record, gradients.view(batch_size, *record.shape))
            for record, gradients in zip(own, formed, strict=True)
            if record is not None
        ]
    if kind is DENSE:
        return [(records[0], value[0])]
    return [(records[0], value.dense().to(stored_dtype(value.y.dtype)))]
