"""Units of privacy: which examples of a data set belong to one user, or one document.

A batch has the same number of rows for each unit, side by side: all examples of a unit, k at most,
or m that each step draws among them, each v times with v views. Where a unit has fewer examples its
last one is repeated, and that fill is masked: its loss is 0 before backward, so it adds nothing to
the unit's gradient. A copy of the unit's own example says nothing about anybody else, and a network
computes with it as it does with the example.
"""

import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dp_clipping.kinds import WrongType, shown
from dp_clipping.sampling import words

WORDS = words.WORDS // 2  # of 64 bits, in a block


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a data set.

    Attributes:
        members: indices of the examples of unit 0, of unit 1, ...
        starts: where each unit begins in `members`, and the number of examples, [units + 1].
        size: examples of each unit in a batch, k or m.
        most: k; None: units have any number of examples.
        are_named: they are those of `unit_ids`, not k consecutive examples.
        views: v, the rows of each example, which the data set is asked for so often.
    """

    members: Tensor
    starts: Tensor
    size: int
    most: int | None
    are_named: bool = False
    views: int = 1

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def rows(self) -> int:
        """Returns the rows of a unit in a batch, k · v or m · v."""
        return self.size * self.views

    def digest(self) -> bytes:
        """Returns a digest of which examples are together; it is not for files."""
        if self.most is None:
            held = torch.cat((self.members, self.starts))
        else:
            held = self._first(torch.arange(len(self), device="cpu"), self.most)
        return hashlib.blake2b(held.numpy().tobytes(), digest_size=16).digest()

    def examples(self, units: Tensor, key: bytes, number: int) -> list[int]:
        """Returns the rows of a batch of some units: `size` indices for each, v times each.

        A unit with more examples gives so many of them, drawn without replacement. Which ones is a
        function of (key, number, unit, how many it has) alone.

        Args:
            key: the sampling key of a run, 32 bytes.
            number: of the batch.
        """
        rows = self._first(units, self.size)
        counts = self.starts[units + 1] - self.starts[units]
        (larger,) = (counts > self.size).nonzero(as_tuple=True)
        if len(larger):
            chosen = _chosen(key, number, units[larger], counts[larger].tolist(), self.size)
            rows[larger] = self.members[
                self.starts[units[larger], None] + torch.tensor(chosen, device="cpu")
            ]
        return rows.flatten().repeat_interleave(self.views).tolist()

    def _first(self, units: Tensor, count: int) -> Tensor:
        """Returns the first examples of units, [units, count]; the last one again for fill."""
        places = self.starts[units, None] + torch.arange(count, device="cpu")
        return self.members[torch.minimum(places, self.starts[units + 1, None] - 1)]


def _chosen(
    key: bytes, number: int, units: Tensor, counts: Sequence[int], size: int
) -> list[list[int]]:
    """Returns for each unit `size` of its places 0, 1, ..., ascending, all sets alike.

    They are the first entries of a random permutation (Fisher and Yates). Each unit has ChaCha20
    blocks of its own, so that neither the number of units nor their sizes have any influence.
    """
    derived = hashlib.blake2b(
        number.to_bytes(8, "little"), key=key, person=b"unit examples", digest_size=32
    )
    blocks = -(-size // WORDS)
    counters = units.numpy().astype(np.uint64)[:, None] * np.uint64(blocks)
    counters = (counters + np.arange(blocks, dtype=np.uint64)).ravel()
    stream = np.ascontiguousarray(words.blocks(derived.digest(), counters).T)
    numbers = stream.astype("<u4", copy=False).view("<u8").reshape(len(units), -1)[:, :size]
    found = []
    for count, own in zip(counts, numbers.tolist(), strict=True):
        moved: dict[int, int] = {}  # entries of 0, 1, ..., count - 1 that were exchanged
        chosen = []
        for i, word in enumerate(own):
            place = i + (word * (count - i) >> 64)
            chosen.append(moved.get(place, place))
            moved[place] = moved.get(i, i)
        found.append(sorted(chosen))
    return found


def units_of(
    examples: int,
    most: int | None,
    unit_ids: Iterable[Hashable] | None = None,
    drawn: int | None = None,
    views: int = 1,
) -> Units:
    """Returns the units of a data set of `examples` examples.

    Args:
        most: k, the most examples of a unit. None: any number, for `unit_ids` with `drawn`.
        unit_ids: of each example; units are numbered in the order in which they appear. None: k
            consecutive examples are a unit, and the last one may have fewer.
        drawn: m, how many examples of a unit a batch has. None: all of them.
        views: v, of each example.

    Raises:
        ValueError: `unit_ids` has another length, or a unit has more than k examples.
    """
    size = drawn or most
    assert size is not None
    if unit_ids is None:
        assert most is not None
        starts = torch.arange(0, examples + most, most, device="cpu").clamp(max=examples)
        return Units(torch.arange(examples, device="cpu"), starts, size, most, views=views)
    rows: dict[Hashable, list[int]] = {}
    for index, unit in enumerate(_plain(unit_ids)):
        rows.setdefault(unit, []).append(index)
    given = sum(map(len, rows.values()))
    if given != examples:
        raise ValueError(
            f"unit_ids has {given} entries, and the data set {examples} examples: give the unit of "
            "each example, in the data set's order"
        )
    counts = list(map(len, rows.values()))
    largest = max(counts, default=0)
    if most is not None and largest > most:
        raise ValueError(
            f"unit_ids: a unit has {largest} examples, and examples_per_unit={most} is the most "
            f"that one may have: give examples_per_unit={largest}, or leave it out and give "
            "examples_per_step=1, with which each step draws one of a unit's examples"
        )
    members = torch.tensor(
        [index for own in rows.values() for index in own], dtype=torch.int64, device="cpu"
    )
    starts = torch.tensor([0, *counts], device="cpu").cumsum(0)
    return Units(members, starts, size, most, are_named=True, views=views)


def _plain(unit_ids: Any) -> Sequence[Hashable]:
    """Returns the entries as what equal ones are found among."""
    if isinstance(unit_ids, Iterator):
        raise WrongType(
            f"unit_ids is {shown(unit_ids)}, which is read once: give a list, as unit_ids=list(..)"
        )
    found = unit_ids.tolist() if hasattr(unit_ids, "tolist") else list(unit_ids)
    if isinstance(unit_ids, str) or any(isinstance(one, list) for one in found[:1]):
        raise WrongType(
            "unit_ids has no entry for each example: give a list, or a tensor of one dimension, "
            "with the unit of each example of the data set"
        )
    return [_comparable(one) for one in found]


def _comparable(unit: Any) -> Hashable:
    """Returns the entry; tensors of one number as that, as each tensor is equal to itself alone.

    Raises:
        WrongType: for an object, which may be equal to itself alone.
        ValueError: for a missing entry.
    """
    if isinstance(unit, Tensor | np.generic) and not unit.ndim:
        unit = unit.item()
    if isinstance(unit, tuple):
        return tuple(map(_comparable, unit))
    if unit is None or (isinstance(unit, float) and math.isnan(unit)):
        raise ValueError(
            f"unit_ids has {unit!r}, and examples whose unit is not known belong to nobody: give "
            "each a unit, one of its own or one for all of them"
        )
    if not isinstance(unit, str | bytes | int | float):
        raise WrongType(
            f"unit_ids has {shown(unit)}, which may be no other's equal: give numbers or strings, "
            "as unit_ids=[user.id for user in users]"
        )
    return unit


def units_in(name: str, rows: int, each: int) -> int:
    """Returns the units in so many rows, of which each has `each`.

    Raises:
        ValueError: they are not whole units. `name` is the argument that says how many there are.
    """
    units, rest = divmod(rows, each)
    if rest:
        fits = f"{units * each} or {units * each + each}" if units else each
        raise ValueError(
            f"{name} is {rows}, and a batch holds {each} rows of each unit: give {fits}"
        )
    return units


def fill_of(rows: Sequence[int], size: int, views: int = 1) -> Tensor | None:
    """Returns which rows of a batch only fill up a unit, bool; None: each unit has k examples.

    In a unit an index that is there already is fill, beyond the `views` of one example.

    Args:
        size: the rows of a unit.
    """
    if size == views:
        return None
    units = torch.tensor(rows, device="cpu").view(-1, size)
    found = torch.zeros_like(units, dtype=torch.bool)
    found[:, views:] = units[:, views:] == units[:, :-views]
    return found.flatten() if found.any() else None
