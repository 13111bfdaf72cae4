"""Sampling schemes beside Poisson sampling: which units each batch has.

The words of a scheme come from `words`, with a purpose of its own. Accounts are in
`dp_clipping.accounting`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dp_clipping.sampling.poisson import Poisson, Scheme, included
from dp_clipping.sampling.words import words

SAMPLINGS = ("poisson", "truncated_poisson", "balls_in_bins", "cyclic")
"""What `sampling` of `make_private` may be."""

FIXED = ("balls_in_bins", "cyclic")
"""Those whose epochs have a fixed number of batches, with each unit in exactly one."""


class Cyclic(Scheme):
    """Each unit is in the same one of `batches` batches of every epoch.

    A permutation that the key determines splits the units once, into batches whose sizes differ by
    at most one. Batch n is part n mod `batches`. So two uses of a unit are exactly `batches` steps
    apart: that is the public minimum separation.
    """

    in_order = True

    def __init__(self, units: int, batches: int) -> None:
        self.units, self.batches = units, batches
        self._order: tuple[Any, ...] = ()  # of which key, and what it is

    def batch(self, key: bytes, number: int) -> Tensor:
        if self._order[:1] != (key,):
            order = np.argsort(words(key, b"cyclic", 0, self.units), kind="stable")
            self._order = key, order
        place = number % self.batches
        start, stop = (self.units * i // self.batches for i in (place, place + 1))
        return torch.from_numpy(np.sort(self._order[1][start:stop]))


class TruncatedPoisson(Scheme):
    """Poisson sampling; of more than `max_batch_size` units a random subset of that size is kept.

    Every subset is as likely as another, whatever the units are. With several data-parallel ranks
    `max_batch_size` bounds the batch of all together, and a rank has at most its part, rounded up.
    """

    def __init__(self, units: int, rate: float, max_batch_size: int) -> None:
        self.units, self.rate, self.max_batch_size = units, rate, max_batch_size

    def batch(self, key: bytes, number: int) -> Tensor:
        drawn = included(key, number, self.units, self.rate).nonzero().flatten()
        if len(drawn) <= self.max_batch_size:
            return drawn
        lots = words(key, b"truncation", number, self.units)[drawn.numpy()]
        kept = np.argsort(lots, kind="stable")[: self.max_batch_size]
        return drawn[torch.from_numpy(np.sort(kept))]


class BallsInBins(Scheme):
    """Each unit is in one of the `batches` batches of an epoch, which it chooses independently.

    Every batch is as likely as another, and every epoch has new choices. With probability below
    batches · 2⁻⁶⁴ a unit is in no batch of an epoch, so that none is more likely than 1/batches.
    """

    in_order = True

    def __init__(self, units: int, batches: int) -> None:
        self.units, self.batches = units, batches
        self._chosen: tuple[Any, ...] = ()  # by which key, in which epoch, and what

    def batch(self, key: bytes, number: int) -> Tensor:
        epoch, place = divmod(number, self.batches)
        if self._chosen[:2] != (key, epoch):
            self._chosen = key, epoch, self.places(words(key, b"balls in bins", epoch, self.units))
        return torch.from_numpy(np.flatnonzero(self._chosen[2] == place))

    def places(self, words: np.ndarray) -> np.ndarray:
        """Returns the batch that each unit chooses; `batches` for none."""
        return words // np.uint64(2**64 // self.batches) if self.batches > 1 else 0 * words


def scheme_of(
    sampling: str, *, units: int, sample_rate: float, max_batch_size: int | None = None,
    secure: bool = False,
) -> Scheme:  # fmt: skip
    """Returns the scheme of a `sampling` of `make_private`.

    Args:
        units: how many there are in the data.
        sample_rate: q; schemes with epochs have 1/q batches in each.
        max_batch_size: the most units of a batch, for truncated Poisson sampling.
        secure: words of Poisson sampling are cryptographic; no other sampling goes with it.
    """
    if sampling in FIXED:
        fixed = {"balls_in_bins": BallsInBins, "cyclic": Cyclic}[sampling]
        return fixed(units, round(1 / sample_rate))
    if max_batch_size is not None:
        return TruncatedPoisson(units, sample_rate, max_batch_size)
    return Poisson(units, sample_rate, secure=secure)
