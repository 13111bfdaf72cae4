"""The samples in a forward's arguments: how many there are, and arguments with others of them."""

import copy
import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_clipping.torch_compat import tree_flatten, tree_map

LOOKED_AT = 32


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns the tree with every tensor changed, also in dataclasses and unknown mappings."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        if isinstance(x, MutableMapping):
            made = copy.copy(x)
            for key, value in x.items():
                made[key] = map_tensors(change, value)
            return made
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            made = copy.copy(x)
            for name, value in vars(x).items():
                object.__setattr__(made, name, map_tensors(change, value))
            return made
        return x

    return tree_map(leaf, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors among the leaves that PyTorch finds in the tree."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns every tensor in the tree, also in what PyTorch does not open, as `map_tensors`."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(note, tree)
    return found


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
        """Returns the largest batch dimension of the inputs; one of 1 is broadcast, even to 0.

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
        """Returns the arguments with every tensor that has the samples changed."""

        def leaf(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.dim():
                return x
            dim = self._dim(x)
            return change(x, dim) if x.shape[dim] == self.size else x

        return tree_map(leaf, (self.args, self.kwargs))

    def with_samples(self, count: int) -> tuple[tuple, dict]:
        """Returns arguments of the first samples, so many, repeated where there are fewer."""
        return self.with_rows([i % self.size for i in range(count)])

    def with_rows(self, rows: Sequence[int]) -> tuple[tuple, dict]:
        """Returns arguments whose sample i is this batch's sample rows[i]."""
        index = torch.tensor(rows, dtype=torch.long)
        return self._map(lambda x, dim: x.index_select(dim, index.to(x.device)))

    def with_factor(self, row: int, factor: float) -> "Batch":
        """Returns a batch in which one sample's floating-point numbers are larger."""

        def larger(x: Tensor, dim: int) -> Tensor:
            if not x.is_floating_point():
                return x
            factors = torch.ones(self.size, dtype=x.dtype, device=x.device)
            factors[row] = factor
            return x * factors.view(-1, *[1] * (x.dim() - 1 - dim))

        return Batch(*self._map(larger), self._batch_first)

    @property
    def has_floats(self) -> bool:
        """Returns whether any of the samples' tensors has floating-point numbers."""
        found: list[bool] = []

        def note(x: Tensor, dim: int) -> Tensor:
            found.append(x.is_floating_point())
            return x

        self._map(note)
        return any(found)

    def distinct(self, count: int) -> list[int]:
        """Returns the first so many samples that differ from each other, or as many as there are.

        Looks at the first `LOOKED_AT` samples only; on a GPU the host waits.
        """
        rows: list[list[Tensor]] = []

        def note(x: Tensor, dim: int) -> Tensor:
            first = x.detach().movedim(dim, 0)[:LOOKED_AT]
            rows.append([row.nan_to_num() if row.is_floating_point() else row for row in first])
            return x

        self._map(note)
        found: list[int] = []
        for i in range(min(self.size, LOOKED_AT)):
            if len(found) < count and not any(
                all(torch.equal(x[i], x[j]) for x in rows) for j in found
            ):
                found.append(i)
        return found

    def first(self, count: int) -> "Batch":
        """Returns a view of the first samples."""
        return Batch(*self._map(lambda x, dim: x.narrow(dim, 0, count)), self._batch_first)

    def first_sample(self) -> tuple[tuple, dict]:
        """Returns a view of the first sample."""
        return self._map(lambda x, dim: x.narrow(dim, 0, 1))

    def with_a_row_of_zeros(self) -> tuple[tuple, dict]:
        """Returns arguments of one sample of zeros: many networks cannot run on an empty batch.

        Where a sample has one whole number it is 1: it may be a length, and no sequence has none.
        """

        def one_row(x: Tensor, dim: int) -> Tensor:
            shape = list(x.shape)
            shape[dim] = 1
            is_length = x.dim() == 1 and not x.is_floating_point() and not x.is_complex()
            return x.new_ones(shape) if is_length else x.new_zeros(shape)

        return self._map(one_row)

    def without_rows(self, output: Any) -> Any:
        """Returns a network's output without the row that stood in."""

        def leaf(y: Any) -> Any:
            if not isinstance(y, Tensor) or not y.dim():
                return y
            dim = self._dim(y)
            return y.narrow(dim if y.shape[dim] == 1 else 0, 0, 0)

        return tree_map(leaf, output)
