"""The plan: for each linear layer how its norms are taken and what is kept for its clipped sum.

| algorithm | norms | kept | clipped sum | operations | values kept |
| --- | --- | --- | --- | --- | --- |
| `gradient` | of G_i as it is written | G_i | one pass over G | u | B·d·p |
| `width` | token-by-token Gram matrices | both factors | a product | g + u | B·T·(p+d) |
| `input_length` | G_i accumulated over tokens | both factors | a product | u + u | B·T·(p+d) |

with u = 2·B·T·p·d, factors the inputs and output gradients, and g = B·T·(T + block)·(p + d), half
of what full Gram matrices take. What is not kept is formed again in a second backward pass
(`recomputed`), which goes only as deep as it must: layers nearest the input are kept first.

Times are operations and bytes over measured rates of the device; a product whose tiles do not fill
it takes as long as one that does (`predict`; on an H200 within a tenth for layers of 2048² values
or more, from 512 to 8192 tokens). The plan starts from each layer's fastest algorithm and, while
what is kept exceeds the budget, changes the layer that loses the least time a byte saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import torch

GRADIENT, WIDTH, INPUT_LENGTH = "gradient", "width", "input_length"
ALGORITHMS = (GRADIENT, WIDTH, INPUT_LENGTH)
NORM_ALGORITHMS = ("auto", INPUT_LENGTH, WIDTH)
LONGEST_GRAM = 1024  # tokens: beyond, the allowance for rounding is felt (see layers/linear.py)
SUM_BYTES = 4  # of a clipped sum's element


@dataclass(frozen=True)
class Rates:
    """Of one device.

    Attributes:
        product, gram, weighted: operations a second of the kernels gradient, gram and
            weighted_product in 16 bit where they fill the device.
        single: of products in float32, relative to those.
        bandwidth: bytes a second that `weighted_sum` reads and writes.
        step: seconds that a tile of one sample's product takes beside its operations.
        processors: programs that run at a time.
        tile: rows and columns of the products' tiles.
        block: tokens of a Gram tile.
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
    """Of a device: the measured ones that are kept for it (see `calibration`), or the defaults."""
    if device.type != "cuda":
        return Rates()
    from dp_clipping.planning import calibration  # which measures what this file predicts

    return calibration.known(device) or default_rates(device)


def default_rates(device: torch.device) -> Rates:
    """An H200's, by the number of multiprocessors.

    A device's rates relative to each other matter most, so all are scaled alike.
    """
    full, count = Rates(), torch.cuda.get_device_properties(device).multi_processor_count
    share = count / full.processors
    return replace(
        full,
        product=full.product * share,
        gram=full.gram * share,
        weighted=full.weighted * share,
        bandwidth=full.bandwidth * share,
        processors=count,
    )


@dataclass(frozen=True)
class Use:
    """One call of a linear layer: y [B, T, d] from a [B, T, p]."""

    name: str
    batch_size: int
    tokens: int
    inputs: int
    outputs: int
    element_size: int
    gradient_size: int  # bytes of an element of G

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
class Choice:
    """What one layer does.

    Attributes:
        algorithm: of the norm.
        seconds: predicted, of norm and sum together.
        bytes: kept from backward to the sum.
        recomputed: nothing is kept, the sum is formed in a second backward.
    """

    algorithm: str
    seconds: float
    bytes: int
    recomputed: bool = False


def predict(use: Use, algorithm: str, rates: Rates) -> Choice:
    """Time and bytes of one algorithm for one layer.

    One processor works on a tile; a tile of a sample's product takes its operations and a step.
    What `gradient` writes comes on top, since a program writes when it has computed.
    """
    samples = use.batch_size
    values = use.inputs * use.outputs
    product = _product(use, _waves(use, False, rates), rates.product, rates)
    if algorithm == GRADIENT:
        moved = 2 * samples * values * use.gradient_size + values * SUM_BYTES
        return Choice(algorithm, product + moved / rates.bandwidth, use.gradient_bytes)
    weighted = _product(use, _waves(use, True, rates), rates.weighted, rates)
    if algorithm == WIDTH:
        blocks = ceil(use.tokens / rates.block)
        pairs = blocks * (blocks + 1) / 2
        operations = samples * pairs * rates.block**2 * 2 * (use.inputs + use.outputs)
        return Choice(
            algorithm, operations / _speed(rates.gram, use, rates) + weighted, use.factor_bytes
        )
    return Choice(algorithm, product + weighted, use.factor_bytes)


def steps_of(use: Use, is_sum: bool, rates: Rates) -> float:
    """Seconds of a product's time that do not depend on its rate."""
    return _waves(use, is_sum, rates) * rates.step


def _waves(use: Use, is_sum: bool, rates: Rates) -> int:
    """Tiles of one sample's product that a processor works on, one after the other.

    A sum's tile goes through all samples; without a sum they are divided among processors too.
    """
    tiles = ceil(use.outputs / rates.tile[0]) * ceil(use.inputs / rates.tile[1])
    if is_sum:
        return use.batch_size * ceil(tiles / rates.processors)
    return ceil(use.batch_size * tiles / rates.processors)


def _product(use: Use, waves: int, rate: float, rates: Rates) -> float:
    """Seconds of so many tiles, one after the other."""
    rows, columns = min(rates.tile[0], use.outputs), min(rates.tile[1], use.inputs)
    operations = 2.0 * use.tokens * rows * columns * rates.processors
    return waves * (operations / _speed(rate, use, rates) + rates.step)


def _speed(rate: float, use: Use, rates: Rates) -> float:
    return rate * (rates.single if use.element_size == 4 else 1.0)


def allowed(use: Use, norm_algorithm: str) -> tuple[str, ...]:
    """The algorithms that may serve a layer."""
    if norm_algorithm != "auto":
        return (norm_algorithm,)
    if use.tokens == 1 or use.element_size == 4 or use.tokens > LONGEST_GRAM:
        return (GRADIENT, INPUT_LENGTH)
    return ALGORITHMS


class Plan:
    """Choices by layer, in the order of the forward.

    Args:
        uses: of the linear layers, in the order of the forward.
        rates: of the device.
        budget: bytes that may be kept from backward to the sums; None: no limit.
        norm_algorithm: `auto`, or the one that every layer takes.
        may_recompute: what does not fit the budget even so takes part in a second backward.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        rates: Rates,
        budget: int | None = None,
        norm_algorithm: str = "auto",
        may_recompute: bool = False,
    ):
        self.uses, self.budget = list(uses), budget
        options = [
            [predict(use, algorithm, rates) for algorithm in allowed(use, norm_algorithm)]
            for use in self.uses
        ]
        self.choices = [min(own, key=lambda choice: choice.seconds) for own in options]
        if budget is not None:
            self._shrink(options, budget)
            if may_recompute:
                self._recompute(options, budget)
        self._number = {use.name: n for n, use in enumerate(self.uses)}

    def __contains__(self, name: str) -> bool:
        return name in self._number

    def __getitem__(self, name: str) -> Choice:
        return self.choices[self._number[name]]

    @property
    def bytes(self) -> int:
        """Kept in all."""
        return sum(choice.bytes for choice in self.choices)

    @property
    def is_one_pass(self) -> bool:
        return not any(choice.recomputed for choice in self.choices)

    def _shrink(self, options: list[list[Choice]], budget: int) -> None:
        """Smaller algorithms, the cheapest changes first, until the budget holds."""
        excess = self.bytes - budget
        while excess > 0:
            changes = [
                ((other.seconds - own.seconds) / (own.bytes - other.bytes), n, other)
                for n, own in enumerate(self.choices)
                for other in options[n]
                if other.bytes < own.bytes
            ]
            if not changes:
                return
            _, n, other = min(changes, key=lambda change: change[0])
            excess -= self.choices[n].bytes - other.bytes
            self.choices[n] = other

    def _recompute(self, options: list[list[Choice]], budget: int) -> None:
        """Keep layers from the input on while they fit; those behind run a second backward."""
        used, full = 0, False
        for n, choice in enumerate(self.choices):
            full = full or used + choice.bytes > budget
            if full:
                norm_only = [o for o in options[n] if o.algorithm != GRADIENT] or options[n]
                best = min(norm_only, key=lambda option: option.seconds)
                self.choices[n] = replace(best, bytes=0, recomputed=True)
            else:
                used += choice.bytes

    def measured(self, ranges: Mapping[str, float]) -> dict[str, float]:
        """Seconds of each layer's norm and sum, from those of the ranges in a profiler's trace.

        A launch that several layers have in common, `sum/a+b`, is split by their operations.
        """
        found: dict[str, float] = {}
        for name, seconds in ranges.items():
            layers = name.split("/", 1 if name.startswith("sum/") else 2)[-1].split("+")
            uses = [self.uses[self._number[one]] for one in layers if one in self._number]
            is_gram = name.startswith(f"norm/{WIDTH}/")
            parts = [u.tokens * (u.inputs + u.outputs) if is_gram else u.operations for u in uses]
            for use, part in zip(uses, parts, strict=True):
                found[use.name] = found.get(use.name, 0.0) + seconds * part / sum(parts)
        return found

    def table(self, measured: Mapping[str, float] | None = None) -> str:
        """One line a layer: shapes, algorithm, predicted (and measured) milliseconds, MiB kept."""
        head = ["layer", "B x T x in x out", "algorithm", "predicted ms", "MiB kept"]
        rows = [head + (["measured ms"] if measured else [])]
        for use, choice in zip(self.uses, self.choices, strict=True):
            shape = f"{use.batch_size} x {use.tokens} x {use.inputs} x {use.outputs}"
            algorithm = choice.algorithm + (", recomputed" if choice.recomputed else "")
            row = [use.name, shape, algorithm, f"{choice.seconds * 1e3:.3f}"]
            row.append(f"{choice.bytes / 2**20:.1f}")
            if measured:
                found = measured.get(use.name)
                row.append("" if found is None else f"{found * 1e3:.3f}")
            rows.append(row)
        total = [
            "all", "", "one pass" if self.is_one_pass else "two passes",
            f"{sum(c.seconds for c in self.choices) * 1e3:.3f}", f"{self.bytes / 2**20:.1f}",
        ]  # fmt: skip
        rows.append(total + ([f"{sum(measured.values()) * 1e3:.3f}"] if measured else []))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
