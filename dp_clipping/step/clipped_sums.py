"""Σ_i c_i G_i on the device: coefficients that stay there, and one launch for many parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.kernels.sorted_coefficients import SortedCoefficients
from dp_clipping.kernels.tiles import tile_of
from dp_clipping.kernels.weighted_product import weighted_products
from dp_clipping.kernels.weighted_sum import weighted_sums
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.step.norm_queue import Label


@dataclass(frozen=True)
class Coefficients:
    """Of some clipping groups, on the device.

    Attributes:
        values: c [rows, B] float32.
        rows: clipping group -> its row.
    """

    values: Tensor
    rows: dict[int, int]

    @cached_property
    def sorted(self) -> SortedCoefficients:
        return SortedCoefficients.of(self.values)


def clipped_sums(
    saved: dict[Parameter, Any],
    scale: Coefficients,
    groups: Mapping[Parameter, int],
    shapes: Mapping[Parameter, torch.Size],
    tile_size: int | None,
    label: Label,
) -> dict[Parameter, Tensor]:
    """Σ_i c_i G_i of each parameter, [*parameter] in float32, in the order of `saved`.

    Args:
        remains: parameter -> G [B, *parameter], a linear layer's factors, or what has a
            `weighted_sum`; emptied, so that a sum that leaves frees what it was formed of.
        groups: parameter -> its clipping group.
        shapes: of the parameters as layers use them.
        tile_size: of the kernels, None: chosen by them.
        label: the range of a profiler's trace for "sum" and the parameters it is of.
    """
    row_of = {p: scale.rows[groups[p]] for p in saved}
    dense = [p for p, one in saved.items() if isinstance(one, Tensor)]
    linear = [p for p, one in saved.items() if isinstance(one, LinearFactors)]
    totals: dict[Parameter, Tensor] = {}
    if dense:
        with label("sum", *dense):
            rows = [row_of[p] for p in dense]
            found = weighted_sums([saved[p] for p in dense], scale.values, rows)
        totals.update(zip(dense, found, strict=True))
    if linear:
        with label("sum", *linear):
            pairs, rows = [saved[p].operands for p in linear], [row_of[p] for p in linear]
            tile = tile_of(tile_size, *(left.dtype for left, _ in pairs))
            found = weighted_products(pairs, scale.sorted, rows, tile)
        totals.update(zip(linear, found, strict=True))
    for parameter, one in saved.items():
        if parameter not in totals:
            with label("sum", parameter):
                totals[parameter] = one.weighted_sum(
                    scale.values[row_of[parameter]], shapes[parameter][0]
                )
    saved.clear()
    return {parameter: totals[parameter] for parameter in row_of}
