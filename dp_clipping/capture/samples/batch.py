"""The samples in a forward's arguments: how many there are, and arguments with others of them."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.samples.bags import Bags
from dp_clipping.capture.samples.trees import closed, opened
from dp_clipping.torch_compat import PLAIN_LEAVES, tree_flatten, tree_leaves
from dp_clipping.trials.objects import Objects, exchanged

LOOKED_AT = 32
CALLS = 16  # shapes of arguments that are remembered
OTHER_VALUES = (
    "an argument of the model has shape {shape} in a batch of {size} samples, and other values "
    "than in an earlier batch, so it may hold what it has of several samples: give a tensor with a "
    "row for each sample, as pad_sequence(rows, batch_first=True), or, if it is the same for all, "
    "compute it in forward"
)
LEAVES = attrgetter("leaves")


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns the tree with every tensor changed, also in dataclasses and unknown mappings."""
    leaves, structure = opened(tree)
    return closed([change(x) if isinstance(x, Tensor) else x for x in leaves], structure)


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns every tensor in the tree, also in what PyTorch does not open, as `map_tensors`."""
    found = []
    for x in opened(tree)[0]:  # a comprehension is a call
        if isinstance(x, Tensor):
            found.append(x)
    return found


def are_samples(x: Any, count: int | None) -> bool:
    """Returns whether x is a list or tuple with an entry for each of `count` samples.

    All entries have tensors of the same kinds, and some have no row for each sample.
    """
    if not isinstance(x, list | tuple) or len(x) != count or count == 1:
        return False
    entries = [tensors_of(entry) for entry in x]
    kinds = {tuple([(y.dim(), y.dtype) for y in entry]) for entry in entries}
    have_rows = all(any(y.dim() and len(y) == count for y in entry) for entry in entries)
    return len(kinds) == 1 and any(entries) and not have_rows


def hold_objects(args: tuple, kwargs: dict) -> bool:
    """Returns whether arguments of a call are more than tensors, numbers and strings."""
    return not {*map(type, args), *map(type, kwargs.values())} <= PLAIN_LEAVES


def refuse_iterators(name: str, *trees: Any) -> None:
    """Refuses arguments that can be read once only.

    Raises:
        ValueError: naming the module.
    """
    for leaf in tree_leaves(trees):
        if isinstance(leaf, Iterator):
            raise ValueError(
                f"{name or 'the network'} is given an iterator ({type(leaf).__name__}), which can "
                "be read once, and its forward is run several times to see where the samples are: "
                "give it a list, as list(iterator)"
            )


class Constants:
    """Remembers arguments of a network without a row for each sample, as a mask [T, T] may be one.

    One that had T rows in a batch of another size has none for the samples of a batch of T either.

    Attributes:
        now: key (`Batch.key`) of those in the last forward, which are such in runs on its samples
            -> their rows.
        seen: the same of batches whose losses were one for each sample.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Discards all of them."""
        self.now: Mapping[Hashable, int] = {}
        self.seen: dict[Hashable, set[int]] = {}
        self._values: dict[Hashable, Tensor] = {}

    def keep(self) -> None:
        """Remembers those of the last forward, whose losses were one for each sample."""
        for key, rows in self.now.items():
            self.seen.setdefault(key, set()).add(rows)

    def of(self, batch: "Batch") -> frozenset[int]:
        """Returns the numbers of leaves that are such ones."""
        found = []
        for n, x in enumerate(batch.leaves):
            key = batch.key(n)
            if key in self.now or batch.rows_of(x) in self.seen.get(key, ()):
                found.append(n)
        return frozenset(found)

    def changed(self, batch: "Batch") -> str | None:
        """Returns what is wrong with one that has more rows than there are samples, if anything.

        What is the same for all samples is equal in all batches, where it has the same places.
        Rows of samples that lie one after another are not.
        """
        for n in batch.longer():
            x = batch.leaves[n].detach()
            before = self._values.setdefault(batch.key(n), x.clone())
            parts = tuple(map(slice, map(min, x.shape, before.shape)))
            one, other = x[parts], before[parts].to(x)
            if x.dim() != before.dim() or not torch.allclose(one, other, 0, 0, equal_nan=True):
                return OTHER_VALUES.format(shape=tuple(x.shape), size=batch.size)
        return None


class Shapes:
    """Remembers shapes of a criterion's arguments, to find dimensions that do not count samples.

    A dimension that had size n in an earlier call and has size n now does not count samples, if the
    earlier batch had another size and n is no multiple of it (as for tokens in one dimension).
    """

    def __init__(self) -> None:
        self._seen: dict[tuple, set[tuple[int, torch.Size]]] = {}

    def note(self, arguments: tuple[tuple, dict], size: int) -> None:
        """Remembers the shapes of a call with `size` samples."""
        for key, x in keyed(arguments):
            seen = self._seen.setdefault(key, set())
            if len(seen) < CALLS:
                seen.add((size, x.shape))

    def counts_samples(self, key: tuple, dim: int, size: int) -> bool:
        """Returns whether a dimension of the batch's `size` may count samples."""
        seen = self._seen.get(key, ())
        return not any(shape[dim] == size and size % batch for batch, shape in seen)


def keyed(arguments: tuple[tuple, dict]) -> list[tuple[tuple, Tensor]]:
    """Returns the tensors of a call, each with a key that identifies the argument."""
    args, kwargs = arguments
    given = tensors_of(arguments) if hold_objects(args, kwargs) else [*args, *kwargs.values()]
    tensors = [x for x in given if isinstance(x, Tensor)]
    kinds = tuple(map(Tensor.dim, tensors)), tuple(kwargs)
    return [((n, *kinds), x) for n, x in enumerate(tensors)]


class Batch:
    """The arguments of one forward, with the number of its samples.

    Args:
        args, kwargs: as the network gets them; tensors anywhere in them.
        batch_first: dimension 0 of tensors counts the samples, else dimension 1.
        bags: those of their leaves whose samples lie one after another (`bags.KnownBags`).
        constants: knows leaves without a row for each sample.
        expected: how many samples the loader has yielded, if it is known.

    Attributes:
        size: number of samples.
        leaves: the leaves of the arguments.
        others: key of each leaf of no samples -> its rows.
    """

    def __init__(
        self, args: tuple, kwargs: dict, batch_first: bool, bags: Sequence[Bags] = (),
        constants: "Constants | None" = None, expected: int | None = None,
    ):  # fmt: skip
        self.args, self.kwargs, self._batch_first = args, kwargs, batch_first
        self.bags, self._constants = tuple(bags), constants
        self.leaves, self._structure = tree_flatten((args, kwargs))
        if not PLAIN_LEAVES.issuperset(map(type, self.leaves)):
            self.leaves, self._structure = opened((args, kwargs))
        is_known = constants is not None and (constants.now or constants.seen)
        self._constant = constants.of(self) if constants and is_known else frozenset[int]()
        self.others: dict[Hashable, int] = {}
        for n in self._constant:  # a comprehension is a call
            self.others[self.key(n)] = self.rows_of(self.leaves[n]) or 0
        self.size = self._size_of_bags() if bags else self._size(expected)

    def _size(self, expected: int | None) -> int:
        """Returns the largest batch dimension of the inputs; one of 1 is broadcast, even to 0.

        What is expected comes first if an input has it: a mask [T, T] may be larger.

        Raises ValueError if there is no tensor.
        """
        dim = 0 if self._batch_first else 1
        vectors: dict[int, int] = {}
        more: dict[int, int] = {}
        for n, x in enumerate(self.leaves):
            if n in self._constant:
                continue
            if isinstance(x, Tensor) and x.is_nested:
                raise ValueError(
                    "forward got a nested tensor, in which a sample has no rows of its own: give "
                    "the padded tensor, x.to_padded_tensor(0), and the lengths"
                )
            if isinstance(x, Tensor) and x.dim() == 1:
                vectors[n] = x.shape[0]
            elif isinstance(x, Tensor) and x.dim():
                more[n] = x.shape[dim]
        sizes = more or vectors
        if not sizes:
            raise ValueError(
                "forward got no tensor, so there is no batch to clip samples of: give tensors "
                "themselves, or in tuples, lists, dicts or dataclasses, as model(batch.x, batch.y)"
            )
        found = {*sizes.values()}
        size = 0 if 0 in found else expected if expected in found else max(found)
        for n, rows in (more | vectors).items():
            if rows not in (0, 1, size):
                self.others[self.key(n)] = rows
        return size

    def _size_of_bags(self) -> int:
        """Returns the number of bags.

        Raises ValueError if there are other rows than one for each of them.
        """
        sizes = {one.size(self.leaves) for one in self.bags}
        in_bags = set().union(*map(LEAVES, self.bags))
        beside = [x for n, x in enumerate(self.leaves) if n not in in_bags]
        rows = [x for x in beside if isinstance(x, Tensor) and x.dim()]
        lengths = {len(self.leaves[one.ids]) for one in self.bags} - sizes
        others = {x.shape[self._dim(x)] for x in rows if x.dim() > 1} - {1}
        others |= {len(x) for x in rows if x.dim() == 1} & lengths
        if len(sizes | others) > 1:
            raise ValueError(
                "the arguments of the model have other rows than one for each sample, beside ids "
                f"with offsets of {', '.join(map(str, sorted(sizes)))} bags: "
                f"{', '.join(map(str, sorted(others)))}; give nn.EmbeddingBag one bag for each "
                "sample, numbers for each id as its per_sample_weights, and all else a row for "
                "each sample"
            )
        return sizes.pop()

    def _dim(self, x: Tensor) -> int:
        return 0 if self._batch_first or x.dim() == 1 else 1

    @cached_property
    def _opened(self) -> list[tuple[Any, int | None]]:
        """Returns each leaf, and the dimension of it that counts the samples; None: it has none.

        Leaves of bags have a row for each sample.
        """
        bags = {n: x for one in self.bags for n, x in one.opened(self.leaves).items()}
        return [
            (bags[n], 0) if n in bags else (x, self._dim(x) if self._has_samples(n, x) else None)
            for n, x in enumerate(self.leaves)
        ]

    def rows_of(self, x: Any) -> int | None:
        """Returns the rows of an argument; None of what has none."""
        return x.shape[self._dim(x)] if isinstance(x, Tensor) and x.dim() else None

    def longer(self) -> list[int]:
        """Returns the leaves with more rows than there are samples; vectors only among vectors."""
        tensors = {n: x for n, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.dim()}
        least = min(2, max([x.dim() for x in tensors.values()]))
        return [
            n for n, x in tensors.items() if x.dim() >= least and x.shape[self._dim(x)] > self.size
        ]

    def key(self, number: int) -> Hashable:
        """Returns what identifies a leaf among those of other batches."""
        return self._structure, number

    def _has_samples(self, number: int, x: Any) -> bool:
        return number not in self._constant and self.rows_of(x) == self.size

    def _map(self, change: Callable[[Tensor, int], Tensor]) -> tuple[tuple, dict]:
        """Returns the arguments with every tensor that has the samples changed.

        Args:
            change: takes a tensor, and the dimension that counts the samples.
        """
        return self.with_leaves(lambda n, x, dim: x if dim is None else change(x, dim))

    def with_leaves(self, change: Callable[[int, Any, int | None], Any]) -> tuple[tuple, dict]:
        """Returns the arguments with each leaf changed.

        Args:
            change: takes a leaf's number, the leaf, and the dimension that counts its samples;
                None: it has none.
        """
        leaves = [change(n, *one) for n, one in enumerate(self._opened)]
        bags = {n: x for one in self.bags for n, x in one.closed(leaves).items()}
        return closed([bags.get(n, x) for n, x in enumerate(leaves)], self._structure)

    def with_samples(self, count: int) -> tuple[tuple, dict]:
        """Returns arguments of the first `count` samples, repeated if there are fewer."""
        return self.with_rows([i % self.size for i in range(count)])

    def with_rows(self, rows: Sequence[int] | Tensor) -> tuple[tuple, dict]:
        """Returns arguments whose sample i is this batch's sample rows[i]."""
        index = torch.as_tensor(rows, dtype=torch.long, device="cpu")
        return self._map(lambda x, dim: x.index_select(dim, index.to(x.device)))

    def with_factor(self, row: int, factor: float) -> "Batch":
        """Returns a batch in which one sample's floating-point numbers are larger."""
        factors = torch.ones(self.size, device="cpu")
        factors[row] = factor

        def larger(x: Tensor, dim: int) -> Tensor:
            if not x.is_floating_point():
                return x
            return x * factors.to(x).view(-1, *[1] * (x.dim() - 1 - dim))

        return Batch(*self._map(larger), self._batch_first, self.bags, self._constants)

    def rows(self) -> list[tuple[Tensor, int]]:
        """Returns each tensor with a row for each sample, and the dimension that counts them."""
        return [(x, dim) for x, dim in self._opened if dim is not None]

    def rows_beside_bags(self) -> list[tuple[Tensor, int]]:
        """Returns the same of the tensors that are in no bag, as they were given."""
        in_bags = set().union(*[one.leaves for one in self.bags])
        beside = [(n, x) for n, x in enumerate(self.leaves) if n not in in_bags]
        return [(x, self._dim(x)) for n, x in beside if self._has_samples(n, x)]

    @property
    def has_floats(self) -> bool:
        """Returns whether any of the samples' tensors has floating-point numbers."""
        return any(x.is_floating_point() for x, _ in self.rows())

    def distinct(self, count: int) -> list[int]:
        """Returns the first `count` samples that differ from each other, or all that there are.

        Looks at the first `LOOKED_AT` samples only; on a GPU the host waits.
        """
        rows: list[list[Tensor]] = []
        for x, dim in self.rows():
            first = x.detach().movedim(dim, 0)[:LOOKED_AT]
            rows.append([row.nan_to_num() if row.is_floating_point() else row for row in first])
        found: list[int] = []
        for i in range(min(self.size, LOOKED_AT)):
            if len(found) < count and not any(
                all(torch.equal(x[i], x[j]) for x in rows) for j in found
            ):
                found.append(i)
        return found

    def first(self, count: int) -> "Batch":
        """Returns the first samples, as views where they are not in bags."""
        changed = self._map(lambda x, dim: x.narrow(dim, 0, count))
        return Batch(*changed, self._batch_first, self.bags, self._constants)

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

    def stand_in(self) -> tuple[tuple, dict]:
        """Returns `with_a_row_of_zeros`, with the objects of these arguments, which hold it now.

        `without_rows` gives them their own tensors back.
        """
        new = opened(self.with_a_row_of_zeros())[0]
        pairs = zip(self.leaves, new, strict=True)
        changed = [(old, x) for old, x in pairs if isinstance(old, Tensor) and old is not x]
        self._objects = Objects(self.args, self.kwargs)
        self._shown = {id(x): old for old, x in changed}
        rows = {id(old): x for old, x in changed}
        self._objects.show(rows)
        return exchanged(self.args, rows), self.kwargs

    def without_rows(self, output: Any) -> Any:
        """Returns a network's output without the row of `stand_in`; objects hold none either."""

        def leaf(y: Tensor) -> Tensor:
            if not y.dim():
                return y
            dim = self._dim(y)
            return y.narrow(dim if y.shape[dim] == 1 else 0, 0, 0)

        now = Objects(self.args, self.kwargs)
        left = now.left_since(self._objects)
        now.show({id(x): self._shown.get(id(x), leaf(x)) for x in left})
        return map_tensors(leaf, output)
