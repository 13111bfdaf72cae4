"""Forms clipped sums on the fused kernels; a launch serves many parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import sum_of_one_token
from dp_clipping.kernels.coefficients import Coefficients, SortedCoefficients
from dp_clipping.kernels.convolution.layout import ConvolutionFactors, pack_whole, weight_of
from dp_clipping.kernels.embedding import TokenSums
from dp_clipping.kernels.launch.grouped_launch import Pair
from dp_clipping.kernels.launch.tiles import on_device, tile_of
from dp_clipping.kernels.weighted_product import weighted_products
from dp_clipping.kernels.weighted_sum import weighted_sums
from dp_clipping.layers.recorder import Trainable
from dp_clipping.profiling.profile import NOTHING

Label = Callable[[str, Iterable[Trainable]], AbstractContextManager]
# Values of G of a layer of one token, above which its sum is a product over the batch: that is a
# dozen launches, where one of the kernels that read sample by sample serves many layers.
MOST_SHARED = 1 << 26


@dataclass(frozen=True)
class Table:
    """Points to one embedding among those that share a launch, for its sum."""

    sums: TokenSums
    number: int


def clipped_sums(
    records: Sequence[Trainable], values: list[Any], scale: Coefficients, tile_size: int | None,
    label: Label | None,
) -> list[Tensor]:  # fmt: skip
    """Returns Σ_i c_i G_i of each parameter, [*parameter] in float32, and empties `values`.

    Args:
        values: G [B, *parameter], a linear layer's factors as a pair, a `Table`, a
            convolution's factors, or an object with `weighted_sum`.
    """
    totals: dict[int, Any] = dict.fromkeys(range(len(values)))
    rows = [scale.rows[record.group] for record in records]
    count = scale.values.shape[0]
    kept: list[tuple[int, int, Tensor]] = []  # number of the parameter, row of coefficients, G
    products: list[tuple[int, int, Pair]] = []
    scaled: list[tuple[int, Tensor]] = []  # rows of coefficients, and what scales them
    convolutions: list[int] = []
    parts: dict[int, list[Tensor]] = {}  # of their sums
    tables: dict[TokenSums, list[int]] = {}
    alone: list[int] = []  # those of one launch each
    for n, one in enumerate(values):
        if isinstance(one, Tensor):
            kept.append((n, rows[n], one))
        elif isinstance(one, tuple):
            (size, tokens, outputs), inputs = one[0].shape, one[1].shape[2]
            if tokens == 1 and size * outputs * inputs > MOST_SHARED:
                alone.append(n)
            else:
                products.append((n, rows[n], one))
        elif isinstance(one, Table):
            tables.setdefault(one.sums, []).append(n)
        elif type(one) is ConvolutionFactors:
            convolutions.append(n)
        else:
            alone.append(n)
    if convolutions:
        pack_whole([values[n] for n in convolutions])
    for n in convolutions:
        one, row = values[n], rows[n]
        if one.scale is not None:
            scaled.append((row, one.scale))
            row = count + len(scaled) - 1
        for pair in one.summands:
            products.append((n, row, pair))
        if one.gradients is not None:
            kept.append((n, row, one.gradients))
        parts[n] = []

    coefficients = _with_scaled(scale.values, scaled) if scaled else scale.values
    found: list[Tensor] = []
    if kept:
        numbers, own, given = zip(*kept, strict=True)
        with NOTHING if label is None else label("sum", (records[n] for n in numbers)):
            found += weighted_sums(given, coefficients, own)
    if products:
        numbers, own, pairs = zip(*products, strict=True)
        with NOTHING if label is None else label("sum", (records[n] for n in numbers)):
            tile = tile_of(tile_size, *{one[0].dtype for _, _, one in products})
            ordered = SortedCoefficients.of(coefficients) if scaled else scale.sorted
            found += weighted_products(pairs, ordered, own, tile)
    for (n, _, _), total in zip((*kept, *products), found, strict=True):
        if n in parts:
            parts[n].append(total)
        else:
            totals[n] = total
    for n, several in parts.items():
        totals[n] = weight_of(several, values[n].layout, values[n].shape)
    for sums, mine in tables.items():
        with NOTHING if label is None else label("sum", (records[n] for n in mine)):
            uses = [values[n].number for n in mine]
            found = sums.weighted_sums(uses, scale.values, [rows[n] for n in mine])
        totals |= zip(mine, found, strict=True)
    for n in alone:
        one, c = values[n], scale.values[rows[n]]
        with NOTHING if label is None else label("sum", (records[n],)):
            if isinstance(one, tuple):
                totals[n] = sum_of_one_token(one[0], one[1], c)
            else:
                totals[n] = one.weighted_sum(c)
    values.clear()
    return list(totals.values())


def _with_scaled(values: Tensor, scaled: list[tuple[int, Tensor]]) -> Tensor:
    """Returns coefficients [K, B], and behind them chosen rows times scales [B]."""
    rows, scales = zip(*scaled, strict=True)
    chosen = values
    if len(values) > 1:
        chosen = values[on_device(rows, torch.int64, values.device)]
    return torch.cat([values, chosen * torch.stack(scales)])
