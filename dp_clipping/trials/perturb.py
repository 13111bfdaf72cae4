"""Which samples another run has in place of those of the first, and which of them stay.

The checks of networks, criterions and collate functions exchange samples in these ways. A batch may
have thousands of samples, so places are tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
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

    def among_more(self, where: str) -> "Perturbed":
        """Returns the same with one sample more.

        In "front" of the others, all have other places; "behind", they do as counted from the end.
        """
        rows = self.rows
        rows = torch.cat((rows[-1:], rows) if where == "front" else (rows, rows[:1]))
        return self._replace(rows=rows, more=where, may_fail=True)

    def padded(self, size: int) -> "Perturbed":
        """Returns the same in a batch of `size` rows, in which padding follows the samples.

        Padding is of copies, perhaps of one that does not stay: the last sample takes its place.
        """
        more = size - len(self.rows)
        rows = torch.cat((self.rows, self.rows[-1:].expand(more)))
        return self._replace(rows=rows, stays=torch.cat((self.stays, self.stays.new_zeros(more))))

    @property
    def same(self) -> Tensor:
        """Returns for each of `rows` whether it stays: one more does not."""
        one, stays = self.stays.new_zeros(1), self.stays
        ends = {"front": (one, stays), "behind": (stays, one), "": (stays,)}
        return torch.cat(ends[self.more])


def replaced(size: int, others: Mapping[int, int]) -> Perturbed:
    """Puts other samples in some places.

    Args:
        others: place -> sample.
    """
    rows = torch.arange(size, device="cpu")
    rows[list(others)] = torch.tensor(list(others.values()), dtype=torch.long, device="cpu")
    return Perturbed(rows, rows == torch.arange(size, device="cpu"))


def enlarged(size: int, place: int) -> Perturbed:
    """Makes one sample larger."""
    rows = torch.arange(size, device="cpu")
    return Perturbed(rows, rows != place, larger=place, may_fail=True)


def one_more(size: int) -> Iterator[Perturbed]:
    """Yields all among one sample more, in front of them and behind."""
    for where in SIDES:
        yield replaced(size, {}).among_more(where)


def one_source(stays: Tensor, source: int) -> Perturbed:
    """Puts copies of one sample in the places of all that do not stay."""
    return Perturbed(torch.where(stays, torch.arange(len(stays), device="cpu"), source), stays)


def thirds(rows: Sequence[int], distinct: Sequence[int], count: int) -> Iterator[Perturbed]:
    """Yields `count` exchanges: of each third of the samples in turn, for one of the next third.

    Args:
        rows: the samples.
        distinct: different ones among them: each is in a third of its own.
    """
    first = [rows.index(row) for row in distinct]
    order = first + [i for i in range(len(rows)) if i not in first]
    parts = min(len(rows), 3)
    third = torch.empty(len(rows), dtype=torch.long, device="cpu")
    third[order] = torch.arange(len(rows), device="cpu") % parts
    for number in range(count):
        yield one_source(third != number % parts, order[(number + 1) % parts])


def halves(size: int, number: int) -> list[Perturbed]:
    """Returns exchanges of some samples for one of those that stay.

    At first all that together separate every two samples, both ways round, by the code of Berger
    (1961): each digit of a sample's number, and of how many zeros that has, says whether it stays.
    Later two of a half of them each, which together are all, others in each check. An extreme
    sample is absent from one.
    """
    places, bits = torch.arange(size, device="cpu"), max(1, (size - 1).bit_length())
    if number:
        stays = (places >> number % bits) % 2 == 0
        return [_exchange(stays, number), _exchange(~stays, number + 1)]
    digits = places[:, None] >> torch.arange(bits, device="cpu") & 1
    zeros = bits - digits.sum(1, keepdim=True)
    code = torch.cat((digits, zeros >> torch.arange(bits.bit_length(), device="cpu") & 1), 1).bool()
    return [_exchange(stays, place) for place, stays in enumerate(code.unbind(1))]


def _exchange(stays: Tensor, source: int) -> Perturbed:
    places = torch.arange(len(stays), device="cpu")
    sources = places[stays] if bool(stays.any()) else places  # of one sample
    return one_source(stays, int(sources[-1 - source % len(sources)]))
