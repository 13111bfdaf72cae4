"""Predicts time and memory of a linear layer's norm and clipped sum.

Times are operations and bytes over measured rates of the device; a product whose tiles do not fill
it takes as long as one that does. On an H200 predictions are within a tenth for layers of 2048²
values or more, from 512 to 8192 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

INSTANTIATE, GRAM, ACCUMULATE = "gradient", "width", "input_length"  # as options name them
ALGORITHMS = (INSTANTIATE, GRAM, ACCUMULATE)
LONGEST_GRAM = 1024  # tokens: beyond, the allowance for rounding is felt (see projection.py)
SUM_BYTES = 4  # of a clipped sum's element


@dataclass(frozen=True)
class Rates:
    """Rates of one device.

    Attributes:
        product, gram, weighted: operations per second of the kernels gradient, gram and
            weighted_product in 16 bit where they fill the device.
        single: the rate of products in float32, relative to those.
        bandwidth: bytes per second that `weighted_sum` reads and writes.
        step: seconds that a tile of one sample's product takes beside its operations.
        processors: programs that run at a time.
        tile: rows and columns of the products' tiles.
        block: tokens of a Gram tile; samples of half as many have tiles of that.
    """

    product: float = 775e12
    gram: float = 540e12
    weighted: float = 800e12
    single: float = 0.05
    bandwidth: float = 4.0e12
    step: float = 1e-6
    processors: int = 132
    tile: tuple[int, int] = (128, 256)
    block: int = 128


@lru_cache(maxsize=8)
def rates_of(device: torch.device) -> Rates:
    """Returns the rates of a device: an H200's, scaled by the number of multiprocessors.

    A device's rates relative to each other matter most, so all are scaled alike.
    """
    full = Rates()
    if device.type != "cuda":
        return full
    count = torch.cuda.get_device_properties(device).multi_processor_count
    share = count / full.processors
    return replace(
        full,
        product=full.product * share,
        gram=full.gram * share,
        weighted=full.weighted * share,
        bandwidth=full.bandwidth * share,
        processors=count,
    )


class LinearShape(NamedTuple):
    """One call of a linear layer: y [B, T, d] from a [B, T, p].

    Attributes:
        element_size, gradient_size: bytes of an element of y and a, and of G.
        is_normed_elsewhere: one rank's norm clips what this rank sums, by a plan of its own.
    """

    name: str
    batch_size: int
    tokens: int
    inputs: int
    outputs: int
    element_size: int
    gradient_size: int
    is_normed_elsewhere: bool = False

    @property
    def operations(self) -> float:
        return 2.0 * self.batch_size * self.tokens * self.inputs * self.outputs

    @property
    def gradient_bytes(self) -> int:
        return self.batch_size * self.inputs * self.outputs * self.gradient_size

    @property
    def factor_bytes(self) -> int:
        features = self.inputs + self.outputs
        return self.batch_size * self.tokens * features * self.element_size


@dataclass(frozen=True)
class LayerPlan:
    """The algorithm chosen for one layer, with its predicted cost.

    Attributes:
        algorithm: the algorithm of the norm.
        seconds: predicted, of norm and sum together.
        bytes: kept from backward to the sum.
        recomputed: nothing is kept, the sum is formed in a second backward.
    """

    algorithm: str
    seconds: float
    bytes: int
    recomputed: bool = False


def predict(use: LinearShape, algorithm: str, rates: Rates) -> LayerPlan:
    """Returns time and bytes of one algorithm for one layer.

    One processor works on a tile; a tile of a sample's product takes its operations and a step.
    What `gradient` writes comes on top, since a program writes when it has computed.
    """
    samples = use.batch_size
    values = use.inputs * use.outputs
    if use.tokens == 1 and algorithm == ACCUMULATE:  # read for norms, and multiplied in float32
        seconds = 2 * rates.step + use.operations / (rates.product * rates.single)
        moved = 3 * use.factor_bytes + values * SUM_BYTES
        return LayerPlan(algorithm, seconds + moved / rates.bandwidth, use.factor_bytes)
    product = _product(use, rates.product, rates)
    if algorithm == INSTANTIATE:
        moved = 2 * samples * values * use.gradient_size + values * SUM_BYTES
        return LayerPlan(algorithm, product + moved / rates.bandwidth, use.gradient_bytes)
    weighted = _product(use, rates.weighted, rates)
    if algorithm == GRAM:
        block = rates.block if 2 * use.tokens > rates.block else rates.block // 2
        blocks = ceil(use.tokens / block)
        pairs = blocks * (blocks + 1) / 2
        operations = samples * pairs * block**2 * 2 * (use.inputs + use.outputs)
        return LayerPlan(
            algorithm, operations / _speed(rates.gram, use, rates) + weighted, use.factor_bytes
        )
    return LayerPlan(algorithm, product + weighted, use.factor_bytes)


def _waves(use: LinearShape, rates: Rates) -> int:
    """Returns how many tiles of one sample's product each processor works on in turn.

    A sum's tile goes through all samples, but other layers' tiles, or shares of the samples, keep
    the other processors busy.
    """
    tiles = ceil(use.outputs / rates.tile[0]) * ceil(use.inputs / rates.tile[1])
    return ceil(use.batch_size * tiles / rates.processors)


def _product(use: LinearShape, rate: float, rates: Rates) -> float:
    """Returns the time in seconds of the products of all samples."""
    rows, columns = min(rates.tile[0], use.outputs), min(rates.tile[1], use.inputs)
    operations = 2.0 * use.tokens * rows * columns * rates.processors
    return _waves(use, rates) * (operations / _speed(rate, use, rates) + rates.step)


def _speed(rate: float, use: LinearShape, rates: Rates) -> float:
    return rate * (rates.single if use.element_size == 4 else 1.0)
