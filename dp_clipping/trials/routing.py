"""Notes operators that pick or sort rows by values of samples, and what they return.

A layer that is given such rows has samples in other places of other batches, though it may have had
one row of each, in order, in those that were looked at. So tensors are marked as operators run:

    of samples    computed from the arguments
    moved         rows that an index or a mask, itself of samples, has taken out of the batch

Another such index moves rows back, as `y[order.argsort()]` does. Rows that are written to their
places, or get dimensions of their own for the samples (`rows.view(len(x), -1, width)`, by which the
code says that each sample has as many), are not moved either.
"""

from typing import Any

import torch
from torch import Tensor

from dp_clipping.torch_compat import (
    TorchDispatchMode,
    WeakStorage,
    is_dtype_cast,
    tensors_in,
)

OF_SOME_NUMBERS = ("bernoulli", "bernoulli_", "multinomial", "binary_cross_entropy", "poisson",
                   "binomial")  # fmt: skip
TAKING = ("index", "index_select", "gather", "take_along_dim")
WRITING = (
    "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy",
    "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_", "masked_scatter",
    "masked_scatter_", "scatter_reduce", "scatter_reduce_", "copy_",
)  # fmt: skip


class Routing(TorchDispatchMode):
    """Notes operators whose output's shape or order depends on values, as routing to experts.

    Also whether there are operators that make indices of numbers, or take some numbers only.

    Args:
        arguments: of the forward that it is entered for.
        rows: of the batch.

    Attributes:
        operators: names of those that pick or sort rows.
        checks_values: some make indices of numbers, or take some numbers only.
    """

    def __init__(self, arguments: Any = (), rows: int = 0) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.checks_values = False
        self._rows = rows
        self._of_samples: dict[int, WeakStorage] = {}
        self._moved: dict[tuple, WeakStorage] = {}
        for x in tensors_in(arguments):
            self._mark(x)

    def has_moved(self, x: Tensor) -> bool:
        """Returns whether the rows of a tensor are some that were picked or sorted by values."""
        return bool(self._moved) and _has_storage(x) and _is_marked(self._moved, _place(x))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten, packet = torch.ops.aten, function.overloadpacket
        if function is aten.index.Tensor:
            found = any(i is not None and _is_mask(i) for i in args[1])
        else:
            by_shape = torch.Tag.dynamic_output_shape in function.tags
            found = by_shape or packet is aten.sort
        if found:
            self.operators.add(packet.__name__)
        given = tensors_in((args, kwargs))
        is_of_samples = any([self._is_of_samples(x) for x in given])
        is_moved = is_of_samples and self._moves(packet.__name__, args, given)
        result = function(*args, **(kwargs or {}))
        if is_of_samples and not packet.__name__.endswith("_like"):
            for y in filter(_has_storage, tensors_in(result)):
                self._mark(y)
                if is_moved and not self._gives_places(packet.__name__, y, given[0]):
                    self._moved[_place(y)] = _storage(y)
                elif self._moved:
                    self._moved.pop(_place(y), None)
        if is_dtype_cast(function) and args[0].is_floating_point():
            self.checks_values |= not (result.is_floating_point() or result.is_complex())
        self.checks_values |= packet.__name__ in OF_SOME_NUMBERS
        return result

    def _moves(self, name: str, args: tuple, given: list[Tensor]) -> bool:
        """Returns whether rows of an operator's results are moved."""
        x = given[0]
        if name in TAKING and self._is_of_samples(x):
            return self.has_moved(x) != self._takes_rows(name, x, args)
        if name == "masked_select":
            return True
        if name in WRITING:
            return self.has_moved(given[1] if name == "copy_" else x)
        return any([self.has_moved(x) for x in given])

    def _takes_rows(self, name: str, x: Tensor, args: tuple) -> bool:
        """Returns whether an index or a mask of samples picks rows of the batch."""
        batch = next((d for d, size in enumerate(x.shape) if size == self._rows), 0)
        if name != "index":
            dim, index = args[1] % max(1, x.dim()), args[2]
            return self._is_of_samples(index) and (self.has_moved(x) or dim == batch)
        dim = 0
        for index in args[1]:
            if index is None or not _is_mask(index):
                dims = range(dim, dim + 1)
            else:
                dims = range(dim, dim + index.dim())
            dim = dims.stop
            if index is None or not self._is_of_samples(index):
                continue
            if self.has_moved(x) or batch in dims or (_is_mask(index) and 0 in dims):
                return True
        return False

    def _gives_places(self, name: str, y: Tensor, x: Tensor) -> bool:
        """Returns whether an operator gives rows a dimension for the samples."""
        return name == "view" and y.dim() > x.dim() and y.shape[0] == self._rows

    def _is_of_samples(self, x: Tensor) -> bool:
        return _has_storage(x) and _is_marked(self._of_samples, _storage(x).cdata)

    def _mark(self, x: Tensor) -> None:
        if _has_storage(x):
            storage = _storage(x)
            self._of_samples[storage.cdata] = storage


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _has_storage(x: Tensor) -> bool:
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
    return plain and x.device.type != "meta"


def _storage(x: Tensor) -> WeakStorage:
    """Returns a reference that does not keep the memory: its address is not given to another."""
    return WeakStorage(x.untyped_storage())


def _place(x: Tensor) -> tuple:
    """Returns what views of one storage are told apart by."""
    return _storage(x).cdata, x.storage_offset(), x.shape, x.stride()


def _is_marked(marks: dict[Any, WeakStorage], key: Any) -> bool:
    return key in marks and not marks[key].expired()
