"""Poisson sampling: each sample takes part in each step with probability q, independently.

That is what the accountants assume (Abadi et al. 2016, "Deep Learning with Differential Privacy";
Mironov, Talwar and Zhang 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism"), so
batches have random sizes and may be empty. A *Poisson batch* is the batch of one step on
all data-parallel ranks together, numbered from 0 over all epochs. Which samples it has is a pure
function of a secret key and its number: ranks need not communicate, workers may prefetch, a resume
restores one number, and no seed of the user's has any influence.

Whoever has the key can compute the batches. `schemes` has other ways to choose them, for which
`PoissonSampler` deals out batches alike.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from dp_clipping.sampling.units import Units, fill_of
from dp_clipping.sampling.usage import Ticket
from dp_clipping.sampling.words import blocks, secure_words, words

COPIED = (
    "a {name} holds the key of its batches, and a copy would yield the same ones for other steps: "
    "use the one that make_private returned; engine.save_checkpoint saves where it is"
)


def included(
    key: bytes, step: int, num_samples: int, sample_rate: float, secure: bool = False
) -> Tensor:
    """Returns which samples are in Poisson batch `step`: bool [num_samples].

    Entry i is a function of (key, step, i) and the rate alone. The probability is `sample_rate`
    rounded down to a multiple of 2⁻⁶⁴, so never above the accountant's. With `secure` the words
    are ChaCha20's, else Philox's.
    """
    limit = int(sample_rate * 2**64)
    if secure:
        return torch.from_numpy(_securely(key, step, num_samples, limit))
    return torch.from_numpy(words(key, b"sampling", step, num_samples) < limit)


def _securely(key: bytes, step: int, count: int, limit: int) -> np.ndarray:
    """Returns which of `count` words of 64 bits, by ChaCha20, are below `limit`: bool [count].

    The first 16 bits of a word decide but for one in 65,536, whose others come from another key.
    """

    def own(part: bytes) -> bytes:
        message = step.to_bytes(8, "little") + part
        derived = hashlib.blake2b(message, key=key, person=b"secure sampling", digest_size=32)
        return derived.digest()

    first = secure_words(own(b"first"), count, 16)
    mask = first < limit >> 48
    (open_,) = np.nonzero(first == limit >> 48)
    rest = blocks(own(b"rest"), open_.astype(np.uint64))[:2].astype(np.uint64)
    mask[open_] = (rest[0] << 16 | rest[1] & 0xFFFF) < limit & ((1 << 48) - 1)
    return mask


class Scheme:
    """Chooses the units of each batch: a pure function of a secret key and the batch's number.

    Attributes:
        in_order: batches depend on one another, so numbers count from the batch at which the key
            came into use.
    """

    in_order = False

    def batch(self, key: bytes, number: int) -> Tensor:
        """Returns the units of a batch, ascending indices, int64."""
        raise NotImplementedError

    def split(self, units: Tensor, ranks: int) -> list[Tensor]:
        """Returns each data-parallel rank's part of a batch: sizes differ by at most one."""
        return [units[rank::ranks] for rank in range(ranks)]


class Poisson(Scheme):
    """Each unit takes part in each batch with probability `rate`, independently.

    With `secure` the random words are cryptographic.
    """

    def __init__(self, units: int, rate: float, *, secure: bool = False) -> None:
        self.units, self.rate, self.secure = units, rate, secure

    def batch(self, key: bytes, number: int) -> Tensor:
        mask = included(key, number, self.units, self.rate, self.secure)
        return torch.from_numpy(np.flatnonzero(mask.numpy()))

    def split(self, units: Tensor, ranks: int) -> list[Tensor]:
        """Returns for rank r the units i with i % ranks == r: a unit is always on the same rank."""
        if ranks == 1:
            return [units]
        return [units[units % ranks == rank] for rank in range(ranks)]


class Uncopied:
    """Refuses copies: the batches of a copy would be in another step too."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError. `copy`, `deepcopy` and `pickle` call it."""
        raise TypeError(COPIED.format(name=type(self).__name__))


class PoissonSampler(Uncopied, Sampler[list[int]]):
    """A batch sampler: an iteration yields one rank's part of each batch of `epoch`.

    The `world_size` data-parallel ranks have disjoint parts of a batch, and together the batch of a
    single process (`Scheme.split`). Ranks that share samples (one tensor-parallel group) pass the
    same rank. `num_samples` counts the whole data set. `scheme` chooses the batches; default:
    `Poisson`.

    With `units` a sample is a unit of several examples: units are drawn, `num_samples` counts them,
    and a batch has `units.rows` indices for each.

    Attributes:
        start: the number of the batch at which the key came into use.
        epoch: the numbers of the batches that the loader asks for. An iteration of the loader ends,
            with an error, when this is another object. None: none has begun.
        yielded: where the loader that asks for the next iteration gets what is known of its
            batches. It may prefetch them.
        to_another: yields this rank's parts of batches to any other loader; the owner sets it.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        steps: int,
        key: bytes,
        rank: int = 0,
        world_size: int = 1,
        units: Units | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = steps
        self.rank = rank
        self.world_size = world_size
        self.units = units
        self.scheme = Poisson(num_samples, sample_rate) if scheme is None else scheme
        self.start = 0
        self.epoch: range | None = None
        self.yielded: deque[Ticket] | None = None
        self.to_another: Callable[[], Iterator[list[int]]] = lambda: iter(())
        self._key = key

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        yielded, self.yielded = self.yielded, None
        if yielded is None:
            yield from self.to_another()
            return
        for shares in self.batches():
            rows, views = shares[self.rank], 1 if self.units is None else self.units.views
            yielded.append(Ticket(len(rows), fill=fill_of(rows, self.rows_per_unit, views)))
            yield rows

    def batches(self) -> Iterator[list[list[int]]]:
        """Yields the batches of `epoch`, each as `shares` returns it."""
        yield from map(self.shares, self.epoch or ())

    def shares(self, step: int) -> list[list[int]]:
        """Returns batch `step` as one ascending list of indices for each rank."""
        number = step - self.start if self.scheme.in_order else step
        shares = self.scheme.split(self.scheme.batch(self._key, number), self.world_size)
        if self.units is not None:
            return [self.units.examples(share, self._key, number) for share in shares]
        return [share.tolist() for share in shares]

    def seed(self, number: int, part: int = 0) -> int:
        """Returns the seed of what reading a part of batch `number` draws on this rank."""
        place = part * self.world_size + self.rank
        return int(words(self._key, b"reading", number, place + 1)[place] >> 1)

    @property
    def rows_per_unit(self) -> int:
        return 1 if self.units is None else self.units.rows

    def rekey(self, key: bytes, start: int = 0) -> None:
        """Samples all later batches with another key, as a resumed run does.

        Args:
            start: the number of the batch at which that key came into use.
        """
        self._key, self.start = key, start
