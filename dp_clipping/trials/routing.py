"""Notes operators that pick or sort rows by values of samples, and which tensors have such rows.

A layer that is given such rows has samples in other places of other batches, though it may have had
one row of each, in order, in those that were looked at. So memory is marked as operators run:

    of samples    computed from the arguments, or as many as some values tell (`nonzero`)
    picked        rows that a mask has taken out of the batch, or that are distinct (`unique`)
    sorted        rows that indices of samples have

Other indices of samples move sorted rows back, as `y[order.argsort()]` does. Picked rows are where
the code says if they get a dimension for the samples, as in `rows.view(len(x), -1, width)`. What is
written to places that indices or masks tell is not moved.
"""

from typing import Any

import torch
from torch import Tensor

from dp_clipping.torch_compat import (
    TorchDispatchMode,
    WeakStorage,
    address_of_storage,
    tensors_in,
)

OF_SOME_NUMBERS = ("bernoulli", "bernoulli_", "multinomial", "binary_cross_entropy", "poisson",
                   "binomial")  # fmt: skip
TAKING = ("index", "index_select", "gather", "take_along_dim")
WRITING = (
    "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy",
    "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_", "masked_scatter",
    "masked_scatter_", "scatter_reduce", "scatter_reduce_",
)  # fmt: skip
PICKING = (
    "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
)  # fmt: skip
PICKED, SORTED = 1, 2


class Routing(TorchDispatchMode):
    """Notes tensors whose rows values have picked or sorted, as routing to experts does.

    Args:
        arguments: of the forward that it is entered for.
        rows: of the batch.

    Attributes:
        checks_values: some operators make indices of numbers, or take some numbers only.
    """

    def __init__(self, arguments: Any = (), rows: int = 0) -> None:
        super().__init__()
        self.checks_values = False
        self._rows = rows
        # Weak references do not keep the memory: its address is not given to another.
        self._of_samples: dict[int, WeakStorage] = {}
        self._moved: dict[int | None, int] = {}  # address -> how
        self._has_places: set[tuple] = set()  # picked rows with a dimension for samples
        for x in tensors_in(arguments):
            self._mark(x)

    def has_moved(self, x: Tensor) -> bool:
        """Returns whether the rows of a tensor are some that were picked or sorted by values."""
        return self._how(x) > 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [x for x in _tensors_of(args) if _address(x) in self._of_samples]
        name = function.overloadpacket.__name__
        may_move = given and (self._moved or name in (*TAKING, *PICKING, "sort"))
        how = self._how_of_results(name, args, kwargs or {}, given) if may_move else 0
        result = function(*args, **(kwargs or {}))
        is_made = torch.Tag.dynamic_output_shape in function.tags and name not in TAKING
        if is_made or (given and not name.endswith("_like") and not name.startswith("new_")):
            for y in _tensors_of(result):
                self._mark(y)
                if how or self._has_places:
                    self._note(y, how, given, name == "view" and y.shape[:1] == (self._rows,))
        if name == "_to_copy" and args[0].is_floating_point():
            self.checks_values |= not (result.is_floating_point() or result.is_complex())
        self.checks_values |= name in OF_SOME_NUMBERS
        return result

    def _note(self, y: Tensor, how: int, given: list[Tensor], is_view: bool) -> None:
        """Marks a result.

        Args:
            is_view: it may be rows with a dimension for the samples.
        """
        if (address := _address(y)) is None:
            return
        if how:
            self._moved[address] = how
        has_places = how == PICKED and is_view and y.dim() > given[0].dim()
        if has_places or any([
            _address(x) == address and _place(x) in self._has_places for x in given
        ]):  # fmt: skip
            self._has_places.add(_place(y))

    def _how(self, x: Tensor) -> int:
        """Returns whether rows are `PICKED`, `SORTED` or neither, 0."""
        how = self._moved.get(_address(x), 0) if self._moved else 0
        return 0 if how == PICKED and _place(x) in self._has_places else how

    def _how_of_results(self, name: str, args: tuple, kwargs: dict, given: list[Tensor]) -> int:
        """Returns what rows of an operator's results are.

        Args:
            given: the tensors of samples among its arguments.
        """
        x = args[0]
        before = self._how(x) if isinstance(x, Tensor) else 0
        if name in TAKING and _address(x) in self._of_samples:
            taken = self._taken(name, x, args)
            return (0 if before else SORTED) if taken == SORTED else max(before, taken)
        if name in PICKING:
            return PICKED
        if name == "sort":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
            return SORTED if dim % max(1, x.dim()) == self._batch_of(x) else before
        if name in WRITING:
            return before
        return max(map(self._how, given))

    def _taken(self, name: str, x: Tensor, args: tuple) -> int:
        """Returns how an index of samples, or a mask, takes rows out of the batch, if it does."""
        batch = self._batch_of(x)
        if name != "index":
            dim, index = args[1] % max(1, x.dim()), args[2]
            is_rows = dim == batch or (name == "index_select" and self._how(x) > 0)
            return SORTED if is_rows and _address(index) in self._of_samples else 0
        is_back = self._how(x) > 0 and sum(index is not None for index in args[1]) == 1
        dim, found = 0, 0
        for index in args[1]:
            is_mask = index is not None and _is_mask(index)
            dims = range(dim, dim + (index.dim() if is_mask else 1))
            dim = dims.stop
            if index is None or not (is_mask or _address(index) in self._of_samples):
                continue
            if batch in dims or is_back or (is_mask and 0 in dims):
                found = max(found, PICKED if is_mask else SORTED)
        return found

    def _batch_of(self, x: Tensor) -> int:
        """Returns the dimension of the samples, or 0, where they may be flattened."""
        return next((d for d, size in enumerate(x.shape) if size == self._rows), 0)

    def _mark(self, x: Tensor) -> None:
        address = _address(x)
        if address is not None and address not in self._of_samples:
            self._of_samples[address] = WeakStorage(x.untyped_storage())


def _tensors_of(given: Any) -> list[Tensor]:
    """Returns tensors of arguments or results of an operator, with those in lists."""
    found = []
    for x in given if type(given) in (list, tuple) else (given,):
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) in (list, tuple):
            found += [y for y in x if isinstance(y, Tensor)]
    return found


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _address(x: Tensor) -> int | None:
    """Returns what tells the memory of a tensor from others; None: it has none of its own."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
    return address_of_storage(x.untyped_storage()) if plain and not x.is_meta else None


def _place(x: Tensor) -> tuple:
    """Returns what views of one storage are told apart by."""
    return _address(x), x.storage_offset(), x.shape, x.stride()
