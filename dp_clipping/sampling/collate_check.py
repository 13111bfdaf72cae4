"""Checks that a user's collate function makes one row of each sample, from that sample alone.

A sample is what the data set has at an index: it is chosen, clipped and accounted for. Rows that
several samples are in, or several rows of one sample, have another bound than C each. Where k rows
side by side are one unit of privacy, the rows must have the samples' order, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import default_collate

from dp_clipping.sampling.alone import (
    PLAIN,
    Alone,
    CollateState,
    beside,
    chosen_of,
    collated_alone,
    copied,
)
from dp_clipping.sampling.collate import growing_dim
from dp_clipping.trials.holders import held_by
from dp_clipping.trials.perturb import Perturbed, replaced
from dp_clipping.trials.randomness import RandomStates
from dp_clipping.trials.schedule import Schedule
from dp_clipping.trials.values import copied_bytes

LOOKED_AT = 4
LOOKS = 4  # at a difference that may be chance
NEW_LENGTHS = 8  # looks at batches of new lengths, beside those that are due

INSTEAD = (
    "let collate_fn only stack, pad, or leave out samples, one by one, and change them in the "
    "data set's __getitem__"
)
SEVERAL = (
    "collate_fn makes {found}: ε is of the items of data_loader.dataset, so each of them may be in "
    "one row only, or be left out. Make a data set whose items are those rows, as "
    "TensorDataset(rows, labels); " + INSTEAD
)
MIXED = (
    "collate_fn makes other rows of a sample's neighbours when that sample is another one, and "
    "clipping a row bounds what one sample adds only if no other row has anything of it: " + INSTEAD
)
MOVED = (
    "collate_fn (data_collator of a Trainer) returns rows in another order than its samples, or "
    "mixes them, and with examples_per_unit the rows of a unit lie side by side in the loader's "
    "order: do not sort them (pack_padded_sequence has enforce_sorted=False), and " + INSTEAD
)
HIDDEN = (
    "collate_fn makes rows that cannot be compared, or other ones each time it gets the same "
    "samples, so that their order cannot be checked, which examples_per_unit depends on: make "
    "tensors, arrays, numbers or strings, and take random numbers from torch's, NumPy's or "
    "Python's global generators, or in the data set's __getitem__"
)


class Row(NamedTuple):
    """Holds what a row is compared by.

    Attributes:
        sizes: the sizes of what is in it; they change when it is padded to another length.
        content: equal for equal rows, an int for one whole number; None: it cannot be compared.
    """

    sizes: tuple
    content: Any


Rows = dict[str, list[Row]]
"""Part of a batch -> its rows."""


Collated = tuple[Any, Alone | None]
"""A batch, with samples of it alone, from where it was collated, in a worker perhaps."""


class CheckedCollate:
    """A collate function that is checked in calls 1, 2, 4, 8, ... with samples that differ.

    It is called again with copies of up to `LOOKED_AT` of them, with the same random numbers.
    Afterwards random states are as they were: the global ones of the CPU, and generators and plain
    values among the attributes of the function's object (`CollateState`). Torch's own function
    is not checked.

    In the same calls, and where the lengths of a batch are others than before until some were
    found to follow from its samples, it collates single samples, for `guard.lengths`.

    Args:
        batch_dim: the dimension of tensors that counts the samples; of those with one, 0.
        in_order: row i must be sample i.
        level: which calls are checked, as of `Schedule`.

    Attributes:
        alone: samples of the last batch alone, if their lengths are others there.

    Raises:
        ValueError: from a call, for rows that are not of one sample each.
    """

    def __init__(
        self, collate_fn: Callable[[list], Any], *, batch_dim: int, in_order: bool,
        level: str = "first",
    ) -> None:  # fmt: skip
        self.collate_fn, self.batch_dim, self.in_order = collate_fn, batch_dim, in_order
        self.alone: Alone | None = None
        self._level, self._rows, self._batches = level, Schedule(level), Schedule(level)
        self._looks = 0
        self._lengths: list | None = None  # of the last batch whose samples were collated alone
        self._differ = False  # the lengths of a batch have followed from its samples

    def __call__(self, samples: list) -> Any:
        self.alone = None
        if len(samples) < 2 or self.collate_fn is default_collate:
            return self.collate_fn(samples)
        last, count = len(samples) - 1, min(LOOKED_AT, len(samples))
        some = [samples[i * last // (count - 1)] for i in range(count)]
        if not self._rows.is_due() or self._check(some):
            self._rows.skip(1)
        is_due = self._batches.next_is_due()
        # Before the call, which may change its samples.
        chosen = chosen_of(samples) if is_due else {}
        batch = self.collate_fn(samples)
        if is_due or self._has_new_lengths(batch):
            self._looks, self._lengths = self._looks + 1, self._lengths_of(batch)
            chosen, size = chosen or chosen_of(samples), len(samples)
            self.alone = collated_alone(self.collate_fn, size, chosen, batch, self.batch_dim)
            self._differ = self._differ or self.alone is not None
        return batch

    def some_of(self, samples: list) -> Collated:
        """Returns a batch of up to `LENGTHS` of these samples, with some of them alone."""
        some = dict(enumerate(chosen_of(samples).values()))
        with CollateState(self.collate_fn):
            batch = self.collate_fn(list(map(copied, some.values())))
            return batch, collated_alone(self.collate_fn, len(some), some, batch, self.batch_dim)

    def _has_new_lengths(self, batch: Any) -> bool:
        """Returns whether lengths are others than at the last look, which had found no reason."""
        most = NEW_LENGTHS + self._batches.count.bit_length()
        if self._level == "off" or self._differ or self._looks > most:
            return False
        return self._lengths_of(batch) != self._lengths

    def _lengths_of(self, batch: Any) -> list[tuple[int, ...]]:
        """Returns the shapes of the batch's tensors, without the dimension of the samples."""
        shapes = [list(x.shape) for x, _ in beside(batch, batch)]
        return [(*s[: (d := min(self.batch_dim, len(s) - 1))], *s[d + 1 :]) for s in shapes if s]

    def _check(self, samples: list) -> bool:
        """Raises ValueError as a call does; returns whether the samples differ."""
        with CollateState(self.collate_fn) as state:
            return _Check(self, samples, state).run()


class _Check:
    """Compares the rows of some samples with those of others in their places.

    Args:
        collate: the function that is checked.
        samples: up to `LOOKED_AT` of a batch.
        state: of the function, at which the first calls begin.
    """

    def __init__(self, collate: CheckedCollate, samples: list, state: CollateState) -> None:
        self.collate, self.samples = collate, samples
        self.example: Any = None  # batches of a sample, and of two copies of it
        self.parts: list[str] = []  # of a batch, that are compared
        self.alone: list[Rows] = []  # rows of each sample alone
        self.state = state  # at which each call of the function begins

    def run(self) -> bool:
        """Raises ValueError as a call does; returns whether the samples differ."""
        example = self.example = self._example()
        if example is None:
            return True
        self.alone = [self._rows([sample]) for sample in self.samples]
        self._run_twice()
        whole, again = self.whole, self.again
        if not whole and self._growing(example[0]):
            return True  # they make no batch; that the user's call will say
        kept = _one_each(whole, self.alone)
        rows = [row for one in self.alone for own in one.values() for row in own]
        if all(one == self.alone[0] for one in self.alone) and _are_known(rows):
            return False
        steady = [part for part in kept if _are_known(whole[part])]
        steady = [part for part in steady if whole[part] == again.get(part)]
        if self.collate.in_order and not steady:
            raise ValueError(HIDDEN)
        self.parts = [part for part in steady if not _counts(whole[part])]
        count = len(self.samples)
        others = [replaced(count, {place: (place + 1) % count}) for place in range(count)]
        if self.collate.in_order:
            others += [_swapped(count, place) for place in range(count - 1)]
        for other in others:
            for _ in range(LOOKS):  # a generator that is not set back may change rows by chance
                found = self._look(other)
                if found is None:
                    break
                self.state = CollateState(self.collate.collate_fn)  # the numbers that follow
                self._run_twice()
            else:
                raise ValueError(found)
        return True

    def _run_twice(self) -> None:
        """Makes rows of the samples, with which those of other samples are compared."""
        self.again, self.whole = self._rows(self.samples), self._rows(self.samples)
        self.drawn = RandomStates()

    def _look(self, other: Perturbed) -> str | None:
        """Returns what to say of rows with other samples in some places; None: nothing."""
        before, after = self._compared(other)
        changed = {i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y}
        if self.collate.in_order and len(before) == len(self.samples):
            new = {
                i for i, j in enumerate(other.rows.tolist())
                if self.alone[i] != self.alone[j] and before[i] != before[j]
            }  # fmt: skip
            is_moved = any(other.stays[i] for i in changed) or not changed >= new
            return MOVED if is_moved else None
        lost = (Counter(before) - Counter(after)).total()
        return MIXED if lost > int((~other.stays).sum()) and not self._sorts() else None

    def _sorts(self) -> bool:
        """Returns whether rows have an order of their own, and random numbers by their place.

        Then moved rows have other numbers, which cannot be told from mixing.
        """
        self._rows(self.samples)
        if not self.state.has_drawn:
            return False
        places = [i for i in range(len(self.samples) - 1) if self.alone[i] != self.alone[i + 1]]
        pairs = (self._compared(_swapped(len(self.samples), place)) for place in places)
        return any(before and before == after for before, after in pairs)

    def _compared(self, other: Perturbed) -> tuple[list[tuple], list[tuple]]:
        """Returns the rows of the samples, and of others in some of their places.

        Those of all parts of a batch together. Both are empty if they cannot be compared, as some
        are left out, are padded to another length, or got other random numbers.
        """
        found = self._rows([self.samples[i] for i in other.rows.tolist()])
        before, after, again = (
            [rows.get(part, []) for part in self.parts] for rows in (self.whole, found, self.again)
        )
        if (
            self.drawn.have_moved  # other numbers were left for the next row
            or any(_sizes(rows) != _sizes(found.get(n, ())) for n, rows in self.whole.items())
            or before != again
            or len({*map(len, before), *map(len, after)}) > 1
        ):
            return [], []
        return list(zip(*before, strict=True)), list(zip(*after, strict=True))

    def _rows(self, samples: list) -> Rows:
        """Returns the rows of the samples; {} if they are all left out."""
        try:
            return self._growing(self._call(samples))
        except Exception:  # most functions cannot make a batch of none
            return {}

    def _growing(self, batch: Any) -> Rows:
        one, two = self.example
        return dict(_growing(one, two, batch, self.collate.batch_dim))

    def _call(self, samples: list) -> Any:
        self.state.restore()
        return self.collate.collate_fn([copied(sample) for sample in samples])

    def _example(self) -> tuple[Any, Any] | None:
        """Returns batches of one sample, and of two copies of it.

        None: all are left out, or `CollateWithEmpty` will refuse what batches are made of.
        """
        for sample in self.samples:
            try:
                one, two = self._call([sample]), self._call([sample, sample])
                tuple(_growing(one, two, one, self.collate.batch_dim))
            except Exception:  # most functions cannot make a batch of none
                continue
            return one, two
        return None


def _swapped(count: int, place: int) -> Perturbed:
    return replaced(count, {place: place + 1, place + 1: place})


def _one_each(whole: Rows, alone: list[Rows]) -> list[str]:
    """Returns the parts of a batch that have one row of each sample, or of some of them.

    Raises:
        ValueError: if there is none, or one has rows of several that were cut to their number.
    """
    kept, count = [], len(alone)
    found = "as many rows of two copies of a sample as of one"
    for part, rows in whole.items():
        each = [len(one.get(part, ())) for one in alone]
        counted = ", ".join(map(str, each))
        found = f"{len(rows)} rows of {count} samples, and of each of them alone {counted}"
        is_ends = set(each) == {2} and len(rows) == count + 1 and _counts(rows)
        is_cut = len(rows) == count != sum(each) and set(each) != {count} and not _counts(rows)
        if (max(each) <= 1 and sum(each) == len(rows)) or is_ends:
            kept.append(part)
        elif is_cut and all(part in one for one in alone):
            raise ValueError(SEVERAL.format(found=found))
    if not kept:
        raise ValueError(SEVERAL.format(found=found))
    return kept


def _counts(rows: list[Row]) -> bool:
    """Returns whether rows are whole numbers from 0 on that say where a sample begins: offsets."""
    numbers = [row.content for row in rows]
    is_whole = all(type(number) is int for number in numbers)
    return is_whole and numbers[:1] == [0] and numbers == sorted(numbers)


def _growing(
    one: Any, two: Any, batch: Any, dim: int, path: str = "batch"
) -> Iterator[tuple[str, list[Row]]]:
    """Yields each part of `batch` that has rows of samples, with them.

    Args:
        one, two: batches of a sample, and of two copies of it: what grows has rows.
    """
    if isinstance(one, PackedSequence):
        padded, lengths = pad_packed_sequence(batch, batch_first=True)
        yield path, [_row(x[:n]) for x, n in zip(padded, lengths, strict=True)]
    elif isinstance(one, Tensor | np.ndarray):
        own = growing_dim(one, two, dim)
        if own is not None and type(one) is type(batch):
            yield path, [_row(x) for x in _unbound(batch, own)]
    elif isinstance(one, Mapping):
        for key in one:
            if key in two and key in batch:
                yield from _growing(one[key], two[key], batch[key], dim, f"{path}[{key!r}]")
    elif is_dataclass(one):
        yield from _growing(held_by(one), held_by(two), held_by(batch), dim, path)
    elif isinstance(one, list | tuple) and len(one) != len(two):
        yield path, [_row(x) for x in batch]
    elif isinstance(one, list | tuple):
        for i, entries in enumerate(zip(one, two, batch, strict=False)):
            yield from _growing(*entries, dim, f"{path}[{i}]")
    elif one is not None and not isinstance(one, PLAIN):
        raise TypeError(f"a {type(one).__name__} has no rows that are known")


def _unbound(batch: Tensor | np.ndarray, dim: int) -> Iterable[Any]:
    if isinstance(batch, np.ndarray):
        return np.moveaxis(batch, dim, 0)
    return batch.to_dense().cpu().unbind(dim)


def _row(x: Any) -> Row:
    """Returns what is equal for equal rows."""
    if isinstance(x, Tensor):
        if not x.dim() and not x.is_floating_point() and not x.is_complex():
            return Row((), int(x))
        return Row(tuple(x.shape), (str(x.dtype), copied_bytes(x).tobytes()))
    if type(x) is int or isinstance(x, np.integer):
        return Row((), int(x))
    if isinstance(x, np.ndarray | np.generic):
        return Row(x.shape, None if x.dtype.hasobject else (x.dtype.str, x.tobytes()))
    if isinstance(x, Mapping):
        x = [entry for item in x.items() for entry in item]
    if isinstance(x, list | tuple):
        rows = [_row(entry) for entry in x]
        contents = tuple(row.content for row in rows)
        sizes = (len(rows), *(row.sizes for row in rows))
        return Row(sizes, None if None in contents else contents)
    is_known = x is None or isinstance(x, PLAIN)
    return Row((), (type(x).__name__, repr(x)) if is_known else None)


def _sizes(rows: Iterable[Row]) -> set[tuple]:
    return {row.sizes for row in rows}


def _are_known(rows: Iterable[Row]) -> bool:
    return all(row.content is not None for row in rows)
