"""Checks that a user's collate function makes one row of each sample, from that sample alone.

A sample is what the data set has at an index: it is chosen, clipped and accounted for. Rows that
several samples are in, or several rows of one sample, have another bound than C each. Where k rows
side by side are one unit of privacy, the rows must have the samples' order, too.
"""

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import default_collate

LOOKED_AT = 4
PLAIN = (bool, int, float, complex, str, bytes, np.generic)
COUNTING = tuple(((), str(dtype)) for dtype in (torch.int32, torch.int64))
Row = tuple[tuple[int, ...], str, bytes] | str | None
"""What rows are compared by: shape, dtype and content; None: this one cannot be compared."""

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
    "collate_fn makes other rows each time it gets the same samples, so that their order cannot be "
    "checked, which examples_per_unit depends on: take random numbers from torch's, NumPy's or "
    "Python's global generators, or in the data set's __getitem__"
)


class CheckedCollate:
    """A collate function that is checked in calls 1, 2, 4, 8, ... with samples that differ.

    It is called again with copies of up to `LOOKED_AT` of them, with the same random numbers; the
    random states stay as if it was not. Torch's own is not checked.

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
            self._calls += 1
            if self._calls >= self._due:
                last, count = len(samples) - 1, min(LOOKED_AT, len(samples))
                if self._check([samples[i * last // (count - 1)] for i in range(count)]):
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
                return False

            def rows_of(batch: Any) -> dict[str, list[Row]]:
                """Returns the rows of each part of a batch that has some."""
                return dict(_growing(*example, batch, self.batch_dim))

            def rows(*some: Any) -> dict[str, list[Row]]:
                try:
                    return rows_of(collate(*some))
                except Exception:  # all are left out: most functions cannot make a batch of none
                    return {}

            whole = rows_of(collate(*samples))
            draws = _has_drawn(restart)
            alone = [rows(sample) for sample in samples]
            kept = self._one_each(whole, alone)
            again = rows_of(collate(*samples))
            steady = [part for part in kept if None not in whole[part]]
            steady = [part for part in steady if whole[part] == again[part]]
            if self.in_order and not steady:
                raise ValueError(HIDDEN)
            steady = [part for part in steady if not _counts(part, whole[part], alone)]
            for i in range(len(samples)):
                other = samples[(i + 1) % len(samples)]
                changed = rows(*samples[:i], other, *samples[i + 1 :])
                for part in steady if changed else ():
                    self._refuse_mixed(whole[part], changed[part], i, len(samples), draws)
            for i in range(len(samples) - 1 if self.in_order else 0):
                moved = rows(*samples[:i], samples[i + 1], samples[i], *samples[i + 2 :])
                for part in [one for one in steady if len(whole[one]) == len(samples)]:
                    differ = alone[i].get(part) != alone[i + 1].get(part)
                    if not _has_followed(whole[part], moved.get(part, []), i, differ, draws):
                        raise ValueError(MOVED)
            return any(one != alone[0] for one in alone)

    def _one_each(
        self, whole: dict[str, list[Row]], alone: list[dict[str, list[Row]]]
    ) -> list[str]:
        """Returns the parts of a batch that have one row of each sample, or of some of them."""
        kept, count = [], len(alone)
        for part, rows in whole.items():
            each = [len(one.get(part, ())) for one in alone]
            if max(each) <= 1 and sum(each) == len(rows):
                kept.append(part)
            elif len(rows) == count:  # rows of several that were cut to their number
                raise ValueError(SEVERAL.format(found=_counted(count, rows, each)))
        if not kept:
            found = "as many rows of two copies of a sample as of one"
            for part, rows in whole.items():
                found = _counted(count, rows, [len(one.get(part, ())) for one in alone])
            raise ValueError(SEVERAL.format(found=found))
        return kept

    def _refuse_mixed(
        self, before: list[Row], after: list[Row], place: int, samples: int, draws: bool
    ) -> None:
        """Raises ValueError if another sample at `place` has changed more than its row.

        Args:
            draws: random numbers were drawn; other rows may have got other ones, behind `place`.
        """
        if len(before) != len(after):
            return  # one of them is left out: other places tell
        changed = _places(before, after)
        others = {i for i in changed if i < place or (i > place and not draws)}
        is_whole = len(before) == samples
        if is_whole and not others:
            return
        if _shapes(before) != _shapes(after):
            return  # padded to another length
        if self.in_order and is_whole:
            raise ValueError(MOVED)
        if (Counter(before) - Counter(after)).total() > 1:
            raise ValueError(MIXED)


def _has_followed(
    before: list[Row], after: list[Row], place: int, differ: bool, draws: bool
) -> bool:
    """Returns whether rows have followed two neighbours that have changed places.

    Args:
        differ: the two samples, the first of which was at `place`, are not equal.
        draws: as of `_refuse_mixed`.
    """
    if len(before) != len(after):
        return False
    changed, pair = _places(before, after), {place, place + 1}
    if any(i < place or (i > place + 1 and not draws) for i in changed):
        return False
    return pair <= changed or not differ or before[place] == before[place + 1]


def _counts(part: str, rows: list[Row], alone: list[dict[str, list[Row]]]) -> bool:
    """Returns whether rows are whole numbers that say where a sample begins, as offsets do."""
    firsts = {one[part][0] for one in alone if one.get(part)}
    return len(firsts) == 1 and all(
        row.isdigit() if isinstance(row, str) else row is not None and row[:2] in COUNTING
        for row in rows
    )


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


def _places(before: list[Row], after: list[Row]) -> set[int]:
    return {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}


def _counted(samples: int, rows: list[Row], alone: list[int]) -> str:
    each = ", ".join(map(str, alone))
    return f"{len(rows)} rows of {samples} samples, and of each of them alone {each}"


def _shapes(rows: list[Row]) -> set:
    return {row[0] for row in rows if isinstance(row, tuple)}


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
        if one.ndim and one.shape != two.shape:
            batch = torch.as_tensor(batch) if _is_numeric(batch) else batch
            at = min(dim, one.ndim - 1)
            rows = (
                batch.unbind(at) if isinstance(batch, Tensor) else list(np.moveaxis(batch, at, 0))
            )
            yield path, [_row(x) for x in rows]
    elif isinstance(one, Mapping):
        for key in one:
            yield from _growing(one[key], two[key], batch[key], dim, f"{path}[{key!r}]")
    elif isinstance(one, list | tuple) and len(one) != len(two):
        yield path, [_row(x) for x in batch]
    elif isinstance(one, list | tuple):
        for i, entries in enumerate(zip(one, two, batch, strict=True)):
            yield from _growing(*entries, dim, f"{path}[{i}]")
    elif one is not None and not isinstance(one, PLAIN):
        raise TypeError(f"a {type(one).__name__} has no rows that are known")


def _is_numeric(batch: Any) -> bool:
    return isinstance(batch, Tensor) or batch.dtype.kind in "biufc"


def _row(x: Any) -> Row:
    """Returns what is equal for equal rows."""
    if isinstance(x, np.ndarray | np.generic) and _is_numeric(x):
        x = torch.as_tensor(x)
    if isinstance(x, Tensor):
        plain = x.detach().cpu().resolve_conj().resolve_neg()
        plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
        content = plain.view(torch.uint8).numpy().tobytes()
        return tuple(x.shape), str(x.dtype), content
    if isinstance(x, Mapping):
        return _joined([*x.values()])
    if isinstance(x, list | tuple):
        return _joined(x)
    return (
        repr(x) if x is None or isinstance(x, bool | int | float | complex | str | bytes) else None
    )


def _joined(entries: Sequence[Any]) -> Row:
    found = [_row(entry) for entry in entries]
    return None if None in found else repr(found)


def _states() -> tuple[Any, ...]:
    numpy = pickle.dumps(np.random.get_state())
    return random.getstate(), numpy, torch.get_rng_state().numpy().tobytes()


def _has_drawn(restart: Callable[[], None]) -> bool:
    """Returns whether global random numbers were drawn since they were set back."""
    now = _states()
    restart()
    return now != _states()


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
