"""Computes norms of samples whose parameters are split over a tensor-parallel axis.

Each rank writes a table of what adds up over ranks (`SplitNorms.table`), the norm reducer adds the
tables up, and `SplitNorms.unpack` reads the sum. A parameter that all ranks have whole is counted
by one of them. It also has to be the same everywhere: its per-sample gradient is then the same on
each rank, and sums of its squared norms with weights that add up to zero vanish. They do not where
a rank has computed with a part of its input (an RMSNorm over the heads that the rank has): there it
holds a term of the gradient, and no norm of a sample is known.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.norms import Norms
from dp_clipping.distributed.norm_reduce import NormReducer

DIFFERS = 1e-3  # relative; replicas of one norm differ by rounding, far less
NONE = 1e-32  # squared norms that are nothing beside any C: float32 rounds the smallest coarsely


class SplitNorms:
    """Norms of one batch whose parameters are split: each rank has a part of every norm.

    Args:
        sharding: how the network is spread over ranks, a `sharding.Sharding`; None: it is not.

    Attributes:
        is_split: ranks have parts of the norms, to be summed before clipping.
        differ: on the device, whether ranks differed in what all have whole; None before `unpack`.
    """

    def __init__(self, reducer: NormReducer, sharding: Any):
        self._reducer, self._sharding = reducer, sharding
        self.is_split = reducer.splits_parameters
        self.differ: Tensor | None = None

    def table(self, norms: Norms, parameters: Iterable[Any]) -> Tensor:
        """Returns this rank's table for some parameters, whose rows add up over ranks: [5, K, B].

        Squared norms; upper bounds of the squared norms of what will be summed; squared norms of
        shared parameters, as they are and with two weights.
        """
        counts_shared = self._reducer.tensor.rank == 0  # one rank does, of those that have them
        every, whole = set(parameters), self._shared(parameters)
        counted = norms.only(every if counts_shared else every - whole)
        shared = norms.only(whole).squared()
        across, along = self._reducer.contrasts
        rows = counted.squared(), counted.bounds(), shared, across * shared, along * shared
        return torch.stack(rows)

    def unpack(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Returns squared norms and upper bounds [K, B] from the sum of all tables [5, K, B]."""
        squares, bounds, shared, across, along = total
        differs = across.abs() + along.abs() > DIFFERS * shared + NONE
        self.differ = differs.any() if self.differ is None else self.differ | differs.any()
        return squares, torch.where(differs, torch.inf, bounds)

    def _shared(self, parameters: Iterable[Any]) -> set[Any]:
        """Returns the parameters that all ranks of the tensor axis have whole."""
        if self._sharding is None:
            return set(parameters)
        parts = self._sharding.parts
        return {p for p in parameters if not parts[p.parameter].split}
