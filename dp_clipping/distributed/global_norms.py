"""Gathers the norms of the global batch on every rank, for statistics and adaptive thresholds.

The vector that norm_reduce.py describes, with a slot for each sample of all ranks. Clipping
does not depend on it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dp_clipping.distributed.norm_reduce import NormReducer


class GlobalNorms:
    """Squared norms of the global batch, the same bits on every rank; `wait` returns them.

    Attributes:
        sizes: local batch sizes in order of data ranks; samples are in that order.

    Raises:
        RuntimeError: on every rank of a data rank's tensor axis on which ranks have different
            numbers of samples, or if a rank was lost.
    """

    def __init__(self, reducer: NormReducer, squares: Tensor):
        self.sizes = _exchange_sizes(reducer, squares.shape[-1])
        here = reducer.exchanged(squares)
        offset = sum(self.sizes[: reducer.data.rank])
        table = here.new_zeros(len(here), sum(self.sizes))
        table[:, offset : offset + here.shape[1]] = here
        # Each slot has one owner, and adding zeros rounds nothing.
        what = f"squared norms of the global batch of {table.shape[1]}"
        self._pending = reducer.data.sum(table, what, "async")

    def wait(self) -> Tensor:
        """Returns the squared norms [K, G]."""
        return self._pending.wait()


def _exchange_sizes(reducer: NormReducer, size: int) -> list[int]:
    """Returns local batch sizes in order of data ranks, on every rank's host.

    On a GPU they travel on a stream of their own: reading them does not wait for the model.
    """
    sizes = [0] * reducer.data.size
    sizes[reducer.data.rank] = size
    what = "the local batch sizes"
    with torch.cuda.stream(reducer.side_stream):  # None: the current one
        table = torch.tensor(sizes, device=reducer.device)
        table = reducer.data.sum(table, what, "async").wait()
        if reducer.tensor.size > 1:
            # Largest and smallest of the tensor axis, which must be the same.
            both = torch.cat([table, -table])
            table = reducer.tensor.sum(both, what, "async", dist.ReduceOp.MAX).wait()
        found = table.tolist()
    sizes, negative = found[: reducer.data.size], found[reducer.data.size :]
    if negative and [-size for size in negative] != sizes:
        raise RuntimeError(
            "ranks of one tensor-parallel axis have different numbers of samples (largest by data "
            f"rank {sizes}, smallest {[-size for size in negative]}): they must sample the same "
            "batches"
        )
    return sizes
