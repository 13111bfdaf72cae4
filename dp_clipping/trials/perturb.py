"""Which samples another run has in place of those of the first, and which of them stay.

The checks of networks, criterions and collate functions exchange samples in these ways.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

LARGE = 1024.0
SIDES = "front", "behind"


class Perturbed(NamedTuple):
    """The samples of another run.

    Attributes:
        rows: which sample of the first run stands in each place.
        stays: places whose sample is the same in both runs.
        larger: the place of a sample whose numbers are `LARGE` times larger.
        more: "front" or "behind": where `rows` has one sample more, which has no place.
        may_fail: not everything takes such samples, so an error is no finding.
    """

    rows: list[int]
    stays: list[bool]
    larger: int | None = None
    more: str = ""
    may_fail: bool = False

    def of(self, samples: Sequence) -> list:
        """Returns these samples in their places."""
        return [samples[row] for row in self.rows]

    def among_more(self, where: str) -> "Perturbed":
        """Returns the same with one sample more.

        In "front" of the others, all have other places; "behind", they do as counted from the end.
        """
        rows = [self.rows[-1], *self.rows] if where == "front" else [*self.rows, self.rows[0]]
        return self._replace(rows=rows, more=where, may_fail=True)

    def with_more(self, values: Sequence, one: Any) -> list:
        """Returns values of the places, and `one` for the sample that has none."""
        added = {"front": [one, *values], "behind": [*values, one], "": [*values]}
        return added[self.more]


def replaced(size: int, place: int) -> Perturbed:
    """Puts its neighbour in the place of one sample."""
    rows = list(range(size))
    rows[place] = (place + 1) % size
    return Perturbed(rows, [i != place for i in range(size)])


def swapped(size: int, place: int) -> Perturbed:
    """Exchanges a sample and its neighbour."""
    rows = list(range(size))
    rows[place], rows[place + 1] = place + 1, place
    return Perturbed(rows, [i not in (place, place + 1) for i in range(size)])


def enlarged(size: int, place: int) -> Perturbed:
    """Makes one sample larger."""
    stays = [i != place for i in range(size)]
    return Perturbed(list(range(size)), stays, larger=place, may_fail=True)


def one_more(size: int) -> Iterator[Perturbed]:
    """Yields all among one sample more, in front of them and behind."""
    for where in SIDES:
        yield Perturbed(list(range(size)), [True] * size).among_more(where)


def thirds(rows: Sequence[int], distinct: Sequence[int], count: int) -> Iterator[Perturbed]:
    """Yields `count` exchanges: of each third of the samples in turn, for one of the next third.

    Args:
        rows: the samples.
        distinct: different ones among them: each is in a third of its own.
    """
    first = [rows.index(row) for row in distinct]
    order = first + [i for i in range(len(rows)) if i not in first]
    parts = min(len(rows), 3)
    third = {place: n % parts for n, place in enumerate(order)}
    for number in range(count):
        own, source = number % parts, order[(number + 1) % parts]
        stays = [third[i] != own for i in range(len(rows))]
        yield Perturbed([i if stay else source for i, stay in enumerate(stays)], stays)


def half(size: int, number: int) -> Perturbed:
    """Puts copies of samples that stay in the places of about half of them, others in each check.

    The copies come from all over the half that stays, so that extremes of the others are absent.
    """
    stays = splits(size)[number % len(splits(size))]
    sources = [i for i, stay in enumerate(stays) if stay] or list(range(size))
    rows = [
        i if stay else sources[(i + number) // 2 % len(sources)] for i, stay in enumerate(stays)
    ]
    return Perturbed(rows, stays)


def one_source(stays: list[bool], number: int) -> Perturbed:
    """Puts copies of one sample that stays in the places of all others.

    An extreme sample of the batch is absent from one of two halves.
    """
    candidates = [i for i, stay in enumerate(stays) if stay]
    source = candidates[-1 - number % len(candidates)]
    return Perturbed([i if stay else source for i, stay in enumerate(stays)], stays)


def halves(size: int, number: int) -> list[list[bool]]:
    """Returns which samples stay: at first in all of `splits`, later in the two of one way."""
    found = splits(size)
    first = 2 * (number % (len(found) // 2))
    return found if number == 0 else found[first : first + 2]


def splits(size: int) -> list[list[bool]]:
    """Returns halves of a batch: together they separate every two samples, both ways round."""
    bits = range(max(1, (size - 1).bit_length()))
    return [[(i >> bit) % 2 == side for i in range(size)] for bit in bits for side in (0, 1)]
