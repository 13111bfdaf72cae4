"""Times the operations of one linear layer's private gradients.

Operands are there several times over and calls take turns with them, so that none finds its own in
the second-level cache: in a step a whole network lies between two uses of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import ceil, prod
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.kernels.coefficients import SortedCoefficients
from dp_clipping.kernels.gradient import gradient_and_squares
from dp_clipping.kernels.gram import gram_squares
from dp_clipping.kernels.launch.tuning import TimedCall, interleaved
from dp_clipping.kernels.weighted_product import weighted_product
from dp_clipping.kernels.weighted_sum import weighted_sum
from dp_clipping.planning.cost_model import (
    ACCUMULATE,
    ALGORITHMS,
    GRAM,
    INSTANTIATE,
    LinearShape,
    Rates,
    predict,
)
from dp_clipping.planning.plan import Plan, allowed

Samples = dict[str, list[float]]  # name -> milliseconds of one layer, a sample a round

ROTATED_BYTES = 200e6  # four times a second-level cache of 50 MB
GRAM_LAYERS = 8  # whose Gram norms share a launch, as those of a network's layers do


class Shape(NamedTuple):
    """Sizes of a linear layer's use: y [B, T, d] and a [B, T, p]."""

    batch_size: int
    tokens: int
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def operations(self) -> float:
        """Floating-point operations of the ordinary weight gradient."""
        return 2.0 * prod(self)

    def use(self, dtype: torch.dtype = torch.bfloat16) -> LinearShape:
        """Describes the layer as a plan takes it."""
        return LinearShape(
            str(self), self.batch_size, self.tokens, self.inputs, self.outputs,
            dtype.itemsize, stored_dtype(dtype).itemsize,
        )  # fmt: skip


class OneLayer:
    """Random operands of one shape and the calls on them.

    Attributes:
        factors: pairs of y [B, T, d] and a [B, T, p].
        weights: random coefficients in the order that the weighted product takes.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.device, self.dtype = shape, device, dtype
        B, T, d, p = shape
        self._generator = torch.Generator(device).manual_seed(0)
        sets = _sets(B * T * (d + p) * dtype.itemsize)
        self.factors = [(self._normal(B, T, d), self._normal(B, T, p)) for _ in range(sets)]
        self.coefficients = torch.rand(B, generator=self._generator, device=device) + 1e-3
        self.weights = SortedCoefficients.of(self.coefficients)

    def _normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(
            shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype
        )

    @cached_property
    def gradients(self) -> list[Tensor]:
        """Random values in place of per-sample gradients G [B, d, p]."""
        B, _, d, p = self.shape
        dtype = stored_dtype(self.dtype)
        sets = _sets(B * d * p * dtype.itemsize)
        return [self._normal(B, d, p, dtype=dtype) for _ in range(sets)]

    @property
    def sum_bytes(self) -> float:
        """Bytes that `weighted_sum` reads and writes."""
        B, _, d, p = self.shape
        return d * p * (B * stored_dtype(self.dtype).itemsize + 4)

    def _take(self, number: int) -> tuple[Tensor, Tensor]:
        return self.factors[number % len(self.factors)]

    def ordinary(self, number: int) -> Tensor:
        """Computes the weight gradient of a step without privacy, with the library's product."""
        y, a = self._take(number)
        return y.flatten(0, 1).t() @ a.flatten(0, 1)

    def library_gradients(self, number: int) -> Tensor:
        y, a = self._take(number)
        return torch.bmm(y.mT, a)

    def library_grams(self, number: int) -> tuple[Tensor, Tensor]:
        y, a = self._take(number)
        return torch.bmm(a, a.mT), torch.bmm(y, y.mT)

    def gradient(self, number: int) -> tuple[Tensor | None, Tensor]:
        return gradient_and_squares(*self._take(number))

    def norm(self, number: int) -> Tensor:
        """Computes norms that are accumulated over tokens; stores no gradient."""
        return gradient_and_squares(*self._take(number), store=False)[1]

    def gram_alone(self, number: int) -> Tensor:
        y, a = self._take(number)
        return gram_squares([(a, [y])])[0][0]

    def gram(self, number: int) -> Tensor:
        """Computes norms of GRAM_LAYERS layers from Gram matrices."""
        taken = [self._take(number) for number in range(GRAM_LAYERS)]
        return gram_squares([(a, [y]) for y, a in taken])[0]

    def weighted_product(self, number: int) -> Tensor:
        return weighted_product(*self._take(number), self.weights)

    def weighted_sum(self, number: int) -> Tensor:
        return weighted_sum(self.gradients[number % len(self.gradients)], self.coefficients)

    def pieces(self) -> dict[str, TimedCall]:
        names = ("ordinary", "library_gradients", "gradient", "norm", "library_grams", "gram",
                 "gram_alone", "weighted_product", "weighted_sum")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def algorithms(self) -> dict[str, TimedCall]:
        """Returns norm and clipped sum by each algorithm; for `width`, of GRAM_LAYERS layers.

        All norms of a network lie between a layer's norm and its sum: the sum of `gradient` reads
        other gradients than those just written.
        """
        return {
            INSTANTIATE: lambda number: (self.gradient(number), self.weighted_sum(number)),
            GRAM: lambda number: (
                self.gram(number),
                [self.weighted_product(n) for n in range(GRAM_LAYERS)],
            ),
            ACCUMULATE: lambda number: (self.norm(number), self.weighted_product(number)),
        }

    def time_pieces(self, rounds: int) -> Samples:
        return _of_one_layer("gram", interleaved(self.pieces(), self.device, rounds))

    def time_algorithms(self, rounds: int) -> Samples:
        calls = {"ordinary": self.ordinary, **self.algorithms()}
        return _of_one_layer(GRAM, interleaved(calls, self.device, rounds))

    def norm_errors(self) -> dict[str, float]:
        """Returns the relative error of the first sample's norm, by algorithm, against float64."""
        y, a = self._take(0)
        exact = torch.mm(y[0].double().t(), a[0].double()).square().sum().sqrt().item()
        squares = {
            INSTANTIATE: self.gradient(0)[1],
            GRAM: self.gram_alone(0),
            ACCUMULATE: self.norm(0),
        }
        return {name: abs(x[0].double().sqrt().item() / exact - 1) for name, x in squares.items()}


def _sets(size: float) -> int:
    return max(1, ceil(ROTATED_BYTES / size))


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in samples.items()}


def sums_of_pieces(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the time of norm and clipped sum by each algorithm, from the times of the pieces."""
    product = milliseconds["weighted_product"]
    return {
        INSTANTIATE: milliseconds["gradient"] + milliseconds["weighted_sum"],
        GRAM: milliseconds["gram"] + product,
        ACCUMULATE: milliseconds["norm"] + product,
    }


def predicted_ms(shape: Shape, rates: Rates) -> dict[str, float]:
    use = shape.use()
    return {algorithm: predict(use, algorithm, rates).seconds * 1e3 for algorithm in ALGORITHMS}


def judge_plan(shape: Shape, rates: Rates, measured: Mapping[str, float]) -> dict:
    """Compares the plan's choice for this layer alone, without a budget, with the fastest measured.

    Returns:
        chosen, best: algorithms; `best` is the fastest of those that the plan may choose from.
        excess: how much longer the choice takes, relative.
    """
    use = shape.use()
    chosen = Plan([use], rates).choices[0].algorithm
    best = min(allowed(use, "auto"), key=lambda algorithm: measured[algorithm])
    return {"chosen": chosen, "best": best, "excess": measured[chosen] / measured[best] - 1}


def _of_one_layer(name: str, samples: Samples) -> Samples:
    """Returns times of which those of one call, that `GRAM_LAYERS` layers share, are divided."""
    return samples | {name: [ms / GRAM_LAYERS for ms in samples[name]]}
