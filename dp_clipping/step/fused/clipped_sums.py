"""Σ_i c_i G_i on the device: coefficients that stay there, and one launch for many parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.kernels.launch.tiles import tile_of
from dp_clipping.kernels.sorted_coefficients import Coefficients
from dp_clipping.kernels.weighted_product import weighted_products
from dp_clipping.kernels.weighted_sum import weighted_sums
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.profiling.timer import Label


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


class SumQueue:
    """What sums of one backward are formed of, until they are.

    Attributes:
        kept: parameter -> what waits for coefficients, in order of arrival.
        taken: parameters whose sums wait for a common launch, or have been formed.
        scale: coefficients of all groups, when they are known.
        accumulate: takes the sums.
    """

    scale: Coefficients
    accumulate: Callable[[Parameter, Tensor], None]

    def __init__(
        self,
        groups: Mapping[Parameter, int],
        shapes: Mapping[Parameter, torch.Size],
        tile_size: int | None,
        label: Label,
    ):
        self.kept: dict[Parameter, Any] = {}
        self.taken: set[Parameter] = set()
        self._waiting: dict[Parameter, Any] = {}
        self._how = groups, shapes, tile_size, label

    def __len__(self) -> int:
        """How many wait for a launch."""
        return len(self._waiting)

    def add(self, parameter: Parameter, saved: Any) -> None:
        """Lets a parameter's sum wait for a common launch."""
        self._waiting[parameter] = saved
        self.taken.add(parameter)

    def flush(self) -> None:
        """Forms the sums that wait."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self.form(waiting, self.scale)

    @torch.no_grad()
    def form(self, saved: dict[Parameter, Any], scale: Coefficients) -> None:
        """Forms sums of several parameters; `saved` is emptied."""
        self.taken.update(saved)
        totals = clipped_sums(saved, scale, *self._how)
        for parameter in list(totals):
            self.accumulate(parameter, totals.pop(parameter))
