"""Units of privacy: which examples of a data set belong to one user, or one document.

A batch has k rows for each unit, side by side; with v views of an example, v rows for each of its
k. Where a unit has fewer examples its last one is
repeated, and that fill is masked: its loss is 0 before backward, so it adds nothing to the unit's
gradient. A copy of the unit's own example says nothing about anybody else, and a network computes
with it as it does with the example.
"""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dp_clipping.kinds import WrongType, shown


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a data set.

    Attributes:
        members: indices of each unit's examples, [units, k]; the last one of a unit with fewer
            again and again.
        are_named: they are those of `unit_ids`, not k consecutive examples.
        views: v, the rows of each example, which the data set is asked for so often.
    """

    members: Tensor
    are_named: bool = False
    views: int = 1

    def __len__(self) -> int:
        return len(self.members)

    @property
    def size(self) -> int:
        """Returns k."""
        return self.members.shape[1]

    @property
    def rows(self) -> int:
        """Returns k · v, the rows of a unit in a batch."""
        return self.size * self.views

    def digest(self) -> bytes:
        """Returns a digest of which examples are together; it is not for files."""
        return hashlib.blake2b(self.members.numpy().tobytes(), digest_size=16).digest()

    def examples(self, units: Tensor) -> list[int]:
        """Returns the rows of a batch of some units: k indices for each, v times each."""
        return self.members[units].flatten().repeat_interleave(self.views).tolist()


def units_of(
    examples: int, size: int, unit_ids: Iterable[Hashable] | None = None, views: int = 1
) -> Units:
    """Returns the units of a data set of `examples` examples.

    Args:
        size: k, the most examples of a unit.
        unit_ids: of each example; units are numbered in the order in which they appear. None: k
            consecutive examples are a unit, and the last one may have fewer.
        views: v, of each example.

    Raises:
        ValueError: `unit_ids` has another length, or a unit has more than k examples.
    """
    if unit_ids is None:
        count = -(-examples // size)
        indices = torch.arange(count * size).clamp(max=max(0, examples - 1))
        return Units(indices.view(count, size), views=views)
    rows: dict[Hashable, list[int]] = {}
    for index, unit in enumerate(_plain(unit_ids)):
        rows.setdefault(unit, []).append(index)
    given = sum(map(len, rows.values()))
    if given != examples:
        raise ValueError(
            f"unit_ids has {given} entries, and the data set {examples} examples: give the unit of "
            "each example, in the data set's order"
        )
    most = max(map(len, rows.values()), default=0)
    if most > size:
        raise ValueError(
            f"unit_ids: a unit has {most} examples, and examples_per_unit={size} is the most that "
            f"one may have: give examples_per_unit={most}, or data with fewer of each, as "
            "torch.utils.data.Subset(dataset, indices)"
        )
    members = [[*own, *own[-1:] * (size - len(own))] for own in rows.values()]
    return Units(torch.tensor(members).view(-1, size), are_named=True, views=views)


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
        WrongType: for an object that is equal to itself alone.
        ValueError: for a number that is not one, as a missing entry is.
    """
    if isinstance(unit, Tensor) and not unit.dim():
        unit = unit.item()
    if isinstance(unit, tuple):
        return tuple(map(_comparable, unit))
    if unit is None or (not isinstance(unit, str | int | Tensor) and _is_missing(unit)):
        raise ValueError(
            f"unit_ids has {unit!r}, and examples whose unit is not known belong to nobody: give "
            "each a unit, one of its own or one for all of them"
        )
    if type(unit).__hash__ in (object.__hash__, Tensor.__hash__, None):
        raise WrongType(
            f"unit_ids has {shown(unit)}, which no other entry is equal to: give numbers or "
            "strings, as unit_ids=[user.id for user in users]"
        )
    return unit


def _is_missing(unit: Any) -> bool:
    try:
        return bool(unit != unit)
    except TypeError:  # of pandas.NA
        return True
    except ValueError:  # of an array
        return False


def fill_of(rows: Sequence[int], size: int, views: int = 1) -> Tensor | None:
    """Returns which rows of a batch only fill up a unit, bool; None: each unit has k examples.

    In a unit an index that is there already is fill, beyond the `views` of one example.

    Args:
        size: the rows of a unit.
    """
    if size == views or not rows:
        return None
    units = torch.tensor(rows).view(-1, size)
    found = torch.zeros_like(units, dtype=torch.bool)
    found[:, views:] = units[:, views:] == units[:, :-views]
    return found.flatten() if found.any() else None
