"""The samples in a forward's arguments: how many there are, and arguments with others of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


class Batch:
    """Arguments of one forward.

    Args:
        args, kwargs: as the network gets them; tensors anywhere in them.
        batch_first: dimension 0 of tensors counts the samples, else dimension 1.
    """

    def __init__(self, args: tuple, kwargs: dict, batch_first: bool):
        self.args, self.kwargs, self._batch_first = args, kwargs, batch_first
        self.size = self._size()

    def _size(self) -> int:
        """The largest batch dimension of the inputs; inputs of batch 1 are broadcast, even to 0.

        Raises ValueError if there is no tensor.
        """
        leaves = tree_flatten((self.args, self.kwargs))[0]
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.dim()]
        if not tensors:
            raise ValueError("forward got no tensor, so there is no batch to clip samples of")
        matrices = [t for t in tensors if t.dim() > 1] or tensors
        sizes = [t.shape[self._dim(t)] for t in matrices]
        return max(sizes) if min(sizes) else 0

    def _dim(self, x: Tensor) -> int:
        return 0 if self._batch_first or x.dim() == 1 else 1

    def _map(self, change: Callable[[Tensor, int], Tensor]) -> tuple[tuple, dict]:
        """The arguments with every tensor that has the samples changed."""

        def leaf(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.dim():
                return x
            dim = self._dim(x)
            return change(x, dim) if x.shape[dim] == self.size else x

        return tree_map(leaf, (self.args, self.kwargs))

    def with_samples(self, count: int) -> tuple[tuple, dict]:
        """Arguments with that many samples, the first ones, repeated where there are fewer."""
        index = torch.arange(count) % self.size
        return self._map(lambda x, dim: x.index_select(dim, index.to(x.device)))

    def with_rows(self, rows: list[int]) -> tuple[tuple, dict]:
        """Arguments with these samples."""
        return self._map(lambda x, d: x.index_select(d, torch.tensor(rows, device=x.device)))

    def first_sample(self) -> tuple[tuple, dict]:
        """A view of the first sample."""
        return self._map(lambda x, dim: x.narrow(dim, 0, 1))

    def with_a_row_of_zeros(self) -> tuple[tuple, dict]:
        """For an empty batch: many networks cannot run on nothing."""

        def one_row(x: Tensor, dim: int) -> Tensor:
            shape = list(x.shape)
            shape[dim] = 1
            return x.new_zeros(shape)

        return self._map(one_row)

    def without_rows(self, output: Any) -> Any:
        """A network's output without the row that stood in."""

        def leaf(y: Any) -> Any:
            if not isinstance(y, Tensor) or not y.dim():
                return y
            dim = self._dim(y)
            return y.narrow(dim if y.shape[dim] == 1 else 0, 0, 0)

        return tree_map(leaf, output)
