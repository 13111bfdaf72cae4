"""Which samples another run has in place of those of the first, and which of them stay.

The checks of networks, criterions and collate functions exchange samples in these ways. A batch may
have thousands of samples, so places are tensors.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LARGE = 1024.0
SIDES = "front", "behind"


class Perturbed(NamedTuple):
    """The samples of another run.

    Attributes:
        rows: int64, which sample of the first run stands in each place.
        stays: bool, places whose sample is the same in both runs.
        larger: the place of a sample whose numbers are `LARGE` times larger.
        more: "front" or "behind": where `rows` has one sample more, which has no place.
        may_fail: not everything takes such samples, so an error is no finding.
    """

    rows: Tensor
    stays: Tensor
    larger: int | None = None
    more: str = ""
    may_fail: bool = False

    def of(self, samples: Sequence) -> list:
        """Returns these samples in their places."""
        return [samples[row] for row in self.rows.tolist()]

    def among_more(self, where: str) -> "Perturbed":
        """Returns the same with one sample more.

        In "front" of the others, all have other places; "behind", they do as counted from the end.
        """
        rows = self.rows
        rows = torch.cat((rows[-1:], rows) if where == "front" else (rows, rows[:1]))
        return self._replace(rows=rows, more=where, may_fail=True)

    @property
    def same(self) -> Tensor:
        """Returns for each of `rows` whether it stays: one more does not."""
        one, stays = self.stays.new_zeros(1), self.stays
        ends = {"front": (one, stays), "behind": (stays, one), "": (stays,)}
        return torch.cat(ends[self.more])


def replaced(size: int, place: int) -> Perturbed:
    """Puts its neighbour in the place of one sample."""
    rows = torch.arange(size)
    rows[place] = (place + 1) % size
    return Perturbed(rows, torch.arange(size) != place)


def swapped(size: int, place: int) -> Perturbed:
    """Exchanges a sample and its neighbour."""
    rows = torch.arange(size)
    rows[[place, place + 1]] = rows[[place + 1, place]]
    return Perturbed(rows, rows == torch.arange(size))


def enlarged(size: int, place: int) -> Perturbed:
    """Makes one sample larger."""
    rows = torch.arange(size)
    return Perturbed(rows, rows != place, larger=place, may_fail=True)


def one_more(size: int) -> Iterator[Perturbed]:
    """Yields all among one sample more, in front of them and behind."""
    for where in SIDES:
        yield Perturbed(torch.arange(size), torch.ones(size, dtype=torch.bool)).among_more(where)


def thirds(rows: Sequence[int], distinct: Sequence[int], count: int) -> Iterator[Perturbed]:
    """Yields `count` exchanges: of each third of the samples in turn, for one of the next third.

    Args:
        rows: the samples.
        distinct: different ones among them: each is in a third of its own.
    """
    first = [rows.index(row) for row in distinct]
    order = first + [i for i in range(len(rows)) if i not in first]
    parts = min(len(rows), 3)
    third = torch.empty(len(rows), dtype=torch.long)
    third[order] = torch.arange(len(rows)) % parts
    for number in range(count):
        own, source = number % parts, order[(number + 1) % parts]
        stays = third != own
        yield Perturbed(torch.where(stays, torch.arange(len(rows)), source), stays)


def half(size: int, number: int) -> Perturbed:
    """Puts copies of samples that stay in the places of about half of them, others in each check.

    The copies come from all over the half that stays, so that extremes of the others are absent.
    """
    places, stays = torch.arange(size), split(size, number % splits(size))
    sources = places[stays] if bool(stays.any()) else places
    rows = torch.where(stays, places, sources[(places + number) // 2 % len(sources)])
    return Perturbed(rows, stays)


def one_source(stays: Tensor, number: int) -> Perturbed:
    """Puts copies of one sample that stays in the places of all others.

    An extreme sample of the batch is absent from one of two halves.
    """
    (candidates,) = stays.nonzero(as_tuple=True)
    source = candidates[-1 - number % len(candidates)]
    return Perturbed(torch.where(stays, torch.arange(len(stays)), source), stays)


def halves(size: int, number: int) -> list[Tensor]:
    """Returns which samples stay: at first in all halves, later in the two of one way."""
    count = splits(size)
    first = 2 * (number % (count // 2))
    return [split(size, n) for n in (range(count) if number == 0 else (first, first + 1))]


def splits(size: int) -> int:
    """Returns how many halves of a batch together separate every two samples, both ways round."""
    return 2 * max(1, (size - 1).bit_length())


def split(size: int, number: int) -> Tensor:
    """Returns which samples stay in one of these halves: bool [size]."""
    bit, side = divmod(number, 2)
    return (torch.arange(size) >> bit) % 2 == side
