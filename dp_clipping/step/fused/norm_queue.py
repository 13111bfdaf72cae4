"""Queues the operands of norms, and takes the norms with few launches for many layers.

Factors of linear layers are queued with the algorithm of their plan (`dp_clipping.planning.plan`).
Normalisations are queued until their weights' G are formed. Vectors (those G, and those of biases)
are queued until their norms are taken, because they are many and small.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import SUM_ROUNDING
from dp_clipping.clipping.norms import GRAM_ROUNDING, Norm
from dp_clipping.kernels.gradient import gradients_and_squares
from dp_clipping.kernels.gram import MOST_SHARED, gram_squares
from dp_clipping.kernels.launch.tiles import tile_of
from dp_clipping.kernels.norm_layer_gradients import Normalized, norm_layer_gradients
from dp_clipping.kernels.squared_norms import squared_norms
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.recorder import Trainable
from dp_clipping.planning.cost_model import ACCUMULATE, GRAM, INSTANTIATE, LayerPlan
from dp_clipping.profiling.timer import Label
from dp_clipping.torch_compat import version_of


@dataclass
class NormBatch:
    """The results of the launches.

    Attributes:
        norms: by parameter.
        joined: parameters whose norm is part of another one's in `norms`.
        gradients: G [B, *parameter] of those that keep it.
    """

    norms: dict[Trainable, Norm] = field(default_factory=dict)
    joined: set[Trainable] = field(default_factory=set)
    gradients: dict[Trainable, Tensor] = field(default_factory=dict)


Linear = tuple[Trainable, LinearFactors, LayerPlan]


class NormQueue:
    """Linear factors, normalisations and vectors whose norms have not been taken.

    Args:
        tile_size: the tile size of the kernels, None: chosen by them.
    """

    def __init__(self, tile_size: int | None):
        self._tile_size = tile_size
        self.linear: list[Linear] = []
        self.vectors: list[tuple[Trainable, Tensor]] = []
        self._normalized: list[tuple[tuple[Trainable | None, Trainable | None], Normalized]] = []

    def add_normalized(
        self, weight: Trainable | None, bias: Trainable | None, use: Normalized
    ) -> None:
        """Queues a normalisation of which the weight, the bias, or both are trained."""
        self._normalized.append(((weight, bias), use))

    def operands(self) -> list[tuple[Trainable, Any]]:
        """Returns what is queued, by parameter."""
        linear = [(parameter, factors) for parameter, factors, _ in self.linear]
        normalized = [(p, use) for own, use in self._normalized for p in own if p is not None]
        return [*linear, *normalized, *self.vectors]

    def flush(self, everything: bool, label: Label) -> NormBatch:
        """Takes the norms of linear layers whose factors nothing else needs, or of the whole queue.

        G of normalisations is always formed.

        `label`: the range of a profiler's trace for a kind of norm and the parameters it is of.
        """
        waiting, self.linear = self.linear, []
        now: dict[str, list[Linear]] = {INSTANTIATE: [], ACCUMULATE: [], GRAM: []}
        for one in waiting:
            choice = one[2]
            if everything or choice.recomputed or choice.algorithm == INSTANTIATE:
                now[_kind(choice)].append(one)
            else:
                self.linear.append(one)
        found = NormBatch()
        for kind in (INSTANTIATE, ACCUMULATE):
            self._accumulate(found, now[kind], kind, label)
        self._multiply_grams(found, now[GRAM], label)
        self._form_vectors(found, label)
        if everything:
            self._norm_vectors(found, label)
        return found

    def _accumulate(self, found: NormBatch, mine: list[Linear], kind: str, label: Label) -> None:
        alone = [one for one in mine if one[1].is_one_token and kind == ACCUMULATE]
        for parameter, factors, _ in alone:
            with label(f"norm/{kind}", parameter):
                found.norms[parameter] = factors.norm()
        if alone:
            mine = [one for one in mine if one[0] not in found.norms]
        if not mine:
            return
        pairs = [factors.operands for _, factors, _ in mine]
        with label(f"norm/{kind}", *[parameter for parameter, _, _ in mine]):
            tile = tile_of(self._tile_size, *{left.dtype for left, _ in pairs})
            results = gradients_and_squares(pairs, tile, store=kind == INSTANTIATE)
        for (parameter, _, _), (gradients, own) in zip(mine, results, strict=True):
            found.norms[parameter] = Norm(own)
            if gradients is not None:
                found.gradients[parameter] = gradients

    def _multiply_grams(self, found: NormBatch, mine: list[Linear], label: Label) -> None:
        """Multiplies Gram matrices. Layers that read one input share its matrix, and one norm."""
        shared: dict[tuple, list[list[Linear]]] = {}
        for one in mine:
            a = one[1].a
            key = (one[0].norm_key, a.data_ptr(), a.shape, a.stride(), a.dtype, version_of(a))
            rows = shared.setdefault(key, [[]])
            if len(rows[-1]) == MOST_SHARED:
                rows.append([])
            rows[-1].append(one)
        launches: dict[tuple, list[list[Linear]]] = {}
        for (_, _, shape, _, dtype, _), rows in shared.items():
            launches.setdefault((shape[1], dtype), []).extend(rows)
        for (tokens, dtype), rows in launches.items():
            uses = [(row[0][1].a, [factors.y for _, factors, _ in row]) for row in rows]
            with label("norm/width", *[parameter for row in rows for parameter, _, _ in row]):
                results = gram_squares(uses, tile_of(self._tile_size, dtype))
            error = tokens * SUM_ROUNDING[torch.float32]
            for row, own, scale in zip(rows, *results, strict=True):
                found.norms[row[0][0]] = Norm(own, scale, GRAM_ROUNDING, error)
                found.joined.update(parameter for parameter, _, _ in row[1:])

    def _form_vectors(self, found: NormBatch, label: Label) -> None:
        waiting, self._normalized = self._normalized, []
        if not waiting:
            return
        with label("norm/normalization", *(p for own, _ in waiting for p in own if p is not None)):
            results = norm_layer_gradients([use for _, use in waiting])
        for (own, _), formed in zip(waiting, results, strict=True):
            mine = [(p, g) for p, g in zip(own, formed, strict=True) if p is not None]
            found.gradients.update(mine)
            self.vectors += mine

    def _norm_vectors(self, found: NormBatch, label: Label) -> None:
        vectors, self.vectors = self.vectors, []
        alike: dict[tuple, list[tuple[Trainable, Tensor]]] = {}
        for one in vectors:
            alike.setdefault((one[1].shape, one[1].dtype), []).append(one)
        for (shape, _), mine in alike.items():
            with label("norm/dense", *[parameter for parameter, _ in mine]):
                rows = torch.stack([gradients for _, gradients in mine]).view(-1, shape[1])
                results = squared_norms(rows).view(len(mine), -1)
            for (parameter, _), own in zip(mine, results.unbind(0), strict=True):
                found.norms[parameter] = Norm(own)


def _kind(choice: LayerPlan) -> str:
    """Returns the norm's algorithm: a G that is not kept is accumulated and not stored."""
    recomputed = choice.algorithm == INSTANTIATE and choice.recomputed
    return ACCUMULATE if recomputed else choice.algorithm
