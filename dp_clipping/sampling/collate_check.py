"""Checks that a user's collate function makes one row of each sample, from that sample alone.

A sample is what the data set has at an index: it is chosen, clipped and accounted for. Rows that
several samples are in, or several rows of one sample, have another bound than C each. Where k rows
side by side are one unit of privacy, the rows must have the samples' order, too.
"""

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import default_collate

LOOKED_AT = 4
PLAIN = (bool, int, float, complex, str, bytes, np.generic)
COUNTING = ("torch.int32", "torch.int64", "<i4", "<i8", "int")

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
    "collate_fn puts samples in another order, or mixes them, and with examples_per_unit the rows "
    "of a unit lie side by side in the loader's order: do not sort them (pack_padded_sequence has "
    "enforce_sorted=False), and " + INSTEAD
)
HIDDEN = (
    "collate_fn makes rows that cannot be compared, or other ones each time it gets the same "
    "samples, so that their order cannot be checked, which examples_per_unit depends on: make "
    "tensors, arrays, numbers or strings, and take random numbers from torch's, NumPy's or "
    "Python's global generators, or in the data set's __getitem__"
)


@dataclass(frozen=True)
class Row:
    """What a row is compared by.

    Attributes:
        sizes: the sizes of what is in it; they change when it is padded to another length.
        kind: the type of its numbers.
        content: equal for equal rows; None: it cannot be compared.
    """

    sizes: tuple
    kind: str
    content: bytes | None


Rows = dict[str, list[Row]]
"""Part of a batch -> its rows."""


class CheckedCollate:
    """A collate function that is checked in calls 1, 2, 4, 8, ... with samples that differ.

    It is called again with copies of up to `LOOKED_AT` of them, with the same random numbers. The
    global random states of the CPU stay as if it was not. Torch's own function is not checked.

    Args:
        batch_dim: the dimension of tensors that counts the samples; of those with one, 0.
        in_order: row i must be sample i.

    Raises:
        ValueError: from a call, for rows that are not of one sample each.
    """

    def __init__(
        self, collate_fn: Callable[[list], Any], *, batch_dim: int, in_order: bool
    ) -> None:
        self.collate_fn, self.batch_dim, self.in_order = collate_fn, batch_dim, in_order
        self._calls, self._due = 0, 1

    def __call__(self, samples: list) -> Any:
        if len(samples) > 1 and self.collate_fn is not default_collate:
            if self._calls + 1 < self._due:
                self._calls += 1
            else:
                last, count = len(samples) - 1, min(LOOKED_AT, len(samples))
                if self._check([samples[i * last // (count - 1)] for i in range(count)]):
                    self._calls += 1
                    self._due = 2 * self._calls
        return self.collate_fn(samples)

    def _check(self, samples: list) -> bool:
        """Raises ValueError as a call does; returns whether the samples differ."""
        with _same_randomness() as restart:

            def collate(*some: Any) -> Any:
                restart()
                return self.collate_fn([copy.deepcopy(sample) for sample in some])

            example = _example(collate, samples, self.batch_dim)
            if example is None:
                return True

            def rows(*some: Any) -> Rows:
                try:
                    return dict(_growing(*example, collate(*some), self.batch_dim))
                except Exception:  # all are left out: most functions cannot make a batch of none
                    return {}

            alone = [rows(sample) for sample in samples]
            whole = rows(*samples)
            if not whole and dict(_growing(*example, example[0], self.batch_dim)):
                return True  # they make no batch; that the user's call will say
            kept = _one_each(whole, alone)
            if all(one == alone[0] for one in alone):
                return False
            restart()
            _Comparison(samples, whole, alone, kept, rows, self.in_order).run()
            return True


class _Comparison:
    """Compares the rows of some samples with those of others in their places.

    Args:
        whole: rows of the samples.
        alone: rows of each sample alone.
        kept: the parts that have a row of each sample, or of some.
        rows: makes rows of samples, with the same random numbers each time.
        in_order: row i must be sample i.
    """

    def __init__(
        self, samples: list, whole: Rows, alone: list[Rows], kept: list[str],
        rows: Callable[..., Rows], in_order: bool,
    ) -> None:  # fmt: skip
        self.samples, self.whole, self.alone = samples, whole, alone
        self.rows, self.in_order = rows, in_order
        begin, again = _states(), rows(*samples)
        self._random_states = begin[:2], _states()[2]
        steady = [part for part in kept if all(row.content is not None for row in whole[part])]
        steady = [part for part in steady if whole[part] == again.get(part)]
        if in_order and not steady:
            raise ValueError(HIDDEN)
        self.parts = [part for part in steady if not _counts(whole[part])]

    def run(self) -> None:
        """Raises ValueError for rows that are not of one sample each, or not in order."""
        samples, count = self.samples, len(self.samples)
        for i in range(count):
            other = samples[(i + 1) % count]
            self._replace(i, self.rows(*samples[:i], other, *samples[i + 1 :]))
        if self.in_order:
            for i in range(count - 1):
                both = samples[i + 1], samples[i]
                self._exchange(i, self.rows(*samples[:i], *both, *samples[i + 2 :]))

    def _changed(self, found: Rows) -> tuple[list[tuple], list[tuple], set[int]] | None:
        """Returns the rows before and after, all parts of a sample together, and which differ.

        None: they cannot be compared, as some are left out, or padded to another length.
        """
        parts = self.parts
        if not parts or any(len(self.whole[p]) != len(found.get(p, ())) for p in parts):
            return None
        before, after = (
            list(zip(*(x[p] for p in parts), strict=True)) for x in (self.whole, found)
        )
        return before, after, {i for i, pair in enumerate(zip(before, after, strict=True))
                               if pair[0] != pair[1]}  # fmt: skip

    def _has_drawn_the_same(self) -> bool:
        """Returns whether every row got the random numbers that it got before.

        Those of Python and NumPy may be drawn again until they fit, so rows behind another sample
        may have got other ones, even if there were as many.
        """
        now = _states()
        return (now[:2], now[2]) == self._random_states

    def _replace(self, place: int, found: Rows) -> None:
        """Looks at rows where another sample is in the place of one."""
        same_numbers = self._has_drawn_the_same()
        compared = self._changed(found)
        if compared is None:
            return
        before, after, changed = compared
        is_whole = len(before) == len(self.samples)
        if is_whole and all(i == place or (i > place and not same_numbers) for i in changed):
            return
        if any(_sizes(self.whole[part]) != _sizes(found.get(part, ())) for part in self.whole):
            return  # padded to another length
        if self.in_order and is_whole:
            raise ValueError(MOVED)
        if (Counter(before) - Counter(after)).total() > 1:
            raise ValueError(MIXED)

    def _exchange(self, place: int, found: Rows) -> None:
        """Looks at rows where a sample and its neighbour have changed places."""
        same_numbers = self._has_drawn_the_same()
        compared = self._changed(found)
        if compared is None or len(compared[0]) != len(self.samples):
            return  # what leaves out samples of a unit is refused in the forward
        before, _, changed = compared
        pair = {place, place + 1}
        if any(i not in pair and (i < place or same_numbers) for i in changed):
            raise ValueError(MOVED)
        differ = self.alone[place] != self.alone[place + 1]
        if differ and before[place] != before[place + 1] and not pair <= changed:
            raise ValueError(MOVED)


def _one_each(whole: Rows, alone: list[Rows]) -> list[str]:
    """Returns the parts of a batch that have one row of each sample, or of some of them.

    Raises:
        ValueError: if there is none, or one has rows of several that were cut to their number.
    """
    kept, count = [], len(alone)
    found = "as many rows of two copies of a sample as of one"
    for part, rows in whole.items():
        each = [len(one.get(part, ())) for one in alone]
        is_ends = set(each) == {2} and len(rows) == count + 1 and _counts(rows)
        counted = ", ".join(map(str, each))
        found = f"{len(rows)} rows of {count} samples, and of each of them alone {counted}"
        if (max(each) <= 1 and sum(each) == len(rows)) or is_ends:
            kept.append(part)
        elif len(rows) == count != sum(each):
            raise ValueError(SEVERAL.format(found=found))
    if not kept:
        raise ValueError(SEVERAL.format(found=found))
    return kept


def _counts(rows: list[Row]) -> bool:
    """Returns whether rows are whole numbers from 0 on that say where a sample begins: offsets."""
    if not all(row.kind in COUNTING and row.content and not row.sizes for row in rows):
        return False
    numbers = [int.from_bytes(row.content or b"", "little", signed=True) for row in rows]
    return numbers[:1] == [0] and numbers == sorted(numbers)


def _example(collate: Callable[..., Any], samples: list, batch_dim: int) -> tuple[Any, Any] | None:
    """Returns batches of one sample, and of two copies of it.

    None: all are left out, or `CollateWithEmpty` will refuse what batches are made of.
    """
    for sample in samples:
        try:
            one, two = collate(sample), collate(sample, sample)
            tuple(_growing(one, two, one, batch_dim))
        except Exception:  # most functions cannot make a batch of none
            continue
        return one, two
    return None


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
        if one.ndim and one.shape != two.shape and type(one) is type(batch):
            yield path, [_row(x) for x in _unbound(batch, min(dim, one.ndim - 1))]
    elif isinstance(one, Mapping):
        for key in one:
            if key in two and key in batch:
                yield from _growing(one[key], two[key], batch[key], dim, f"{path}[{key!r}]")
    elif isinstance(one, list | tuple) and len(one) != len(two):
        yield path, [_row(x) for x in batch]
    elif isinstance(one, list | tuple):
        if len(one) == len(batch):
            for i, entries in enumerate(zip(one, two, batch, strict=True)):
                yield from _growing(*entries, dim, f"{path}[{i}]")
    elif one is not None and not isinstance(one, PLAIN):
        raise TypeError(f"a {type(one).__name__} has no rows that are known")


def _unbound(batch: Tensor | np.ndarray, dim: int) -> Iterable[Any]:
    if isinstance(batch, np.ndarray):
        return np.moveaxis(batch, dim, 0)
    return (batch if batch.layout is torch.strided else batch.to_dense()).unbind(dim)


def _row(x: Any) -> Row:
    """Returns what is equal for equal rows."""
    if isinstance(x, Tensor):
        plain = x.detach().cpu().resolve_conj().resolve_neg()
        plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
        content = plain.view(torch.uint8).numpy().tobytes()
        return Row(tuple(x.shape), str(x.dtype), content)
    if isinstance(x, np.ndarray | np.generic):
        return Row(x.shape, x.dtype.str, None if x.dtype.hasobject else x.tobytes())
    if isinstance(x, Mapping):
        x = [entry for item in x.items() for entry in item]
    if isinstance(x, list | tuple):
        rows = [_row(entry) for entry in x]
        contents = [row.content for row in rows]
        joined = None if None in contents else pickle.dumps(contents)
        return Row((len(rows), *(row.sizes for row in rows)), "", joined)
    if type(x) is int and -(2**63) <= x < 2**63:
        return Row((), "int", x.to_bytes(8, "little", signed=True))
    is_known = x is None or isinstance(x, PLAIN)
    return Row((), type(x).__name__, repr(x).encode() if is_known else None)


def _sizes(rows: Iterable[Row]) -> set[tuple]:
    return {row.sizes for row in rows}


# ---- random numbers ------------------------------------------------------------------------------


@contextmanager
def _same_randomness() -> Iterator[Callable[[], None]]:
    """Yields what sets the global random states back; restores them at the end."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restart() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)

    try:
        yield restart
    finally:
        restart()


def _states() -> tuple[Any, ...]:
    numpy = pickle.dumps(np.random.get_state())
    return random.getstate(), numpy, torch.get_rng_state().numpy().tobytes()
