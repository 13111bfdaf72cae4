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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from dp_clipping.sampling import chacha
from dp_clipping.sampling.units import Units, fill_of
from dp_clipping.sampling.words import words

KEY_BYTES = 32
OVER = (
    "another iteration of this loader, or load_state_dict, has ended this one: use one at a time, "
    "the last that was begun"
)
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
    are ChaCha20's, else Philox's. Raises ValueError for a key of other than 32 bytes, a negative
    step, fewer than one sample and a rate outside (0, 1].
    """
    _check_sampling(key, step, num_samples, sample_rate)
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

    first = chacha.words(own(b"first"), count, 16)
    mask = first < limit >> 48
    (open_,) = np.nonzero(first == limit >> 48)
    rest = chacha.blocks(own(b"rest"), open_.astype(np.uint64))[:2].astype(np.uint64)
    mask[open_] = (rest[0] << 16 | rest[1] & 0xFFFF) < limit & ((1 << 48) - 1)
    return mask


class Scheme:
    """Chooses the units of each batch: a pure function of a secret key and the batch's number.

    Attributes:
        in_order: batches depend on one another, so each is to be in exactly one step, in order. A
            batch that no step has used comes again, and numbers count from the batch at which the
            key came into use.
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


class Drawn(NamedTuple):
    """Rows of a batch, or of a part of it; `fill` marks rows that only fill up a unit."""

    rows: int
    fill: Tensor | None = None


class Uncopied:
    """Refuses copies: the batches of a copy would be in another step too."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError. `copy`, `deepcopy` and `pickle` call it."""
        raise TypeError(COPIED.format(name=type(self).__name__))


class PoissonSampler(Uncopied, Sampler[list[int]]):
    """A batch sampler: each iteration yields one rank's part of the next `steps` Poisson batches.

    The `world_size` data-parallel ranks have disjoint parts of a batch, and together the batch of a
    single process (`Scheme.split`). Ranks that share samples (one tensor-parallel group) pass the
    same rank. `num_samples` counts the whole data set. `scheme` chooses the batches; default:
    `Poisson`.

    With `units` a sample is a unit of several examples: units are drawn, `num_samples` counts them,
    and a batch has `units.rows` indices for each.

    Its attributes are many because a DataLoader knows a sampler by them, and a checkpoint restores
    it through them.

    Only the iteration that was begun last yields batches: two at a time would each skip those of
    the other.

    Attributes:
        position: how many batches were yielded to the user, over all epochs.
        start: the number of the batch at which the key came into use.
        step: the number of the next batch. A prefetching DataLoader moves it ahead of `position`.
        yielded: this rank's batches, for the loader, if it asks for the next iteration.
        on_batch: called with the number of a Poisson batch before it is yielded.
        on_direct_use: called when batches are taken by another loader than the one that owns this.
        why_not_alone: a reason not to yield batches to another loader.
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
        _check_sampling(key, 0, num_samples, sample_rate)
        if steps < 1:
            raise ValueError(f"steps is {steps}: give 1 or more")
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: give 1 or more")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: give 0 to {world_size - 1}, below world_size")
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = steps
        self.rank = rank
        self.world_size = world_size
        self.units = units
        self.scheme = Poisson(num_samples, sample_rate) if scheme is None else scheme
        self.position = self.step = self.start = 0
        self.yielded: deque[Drawn] | None = None
        self.on_batch: Callable[[int], object] | None = None
        self.on_direct_use: Callable[[], object] = _nothing
        self.why_not_alone: str | None = None
        self._iteration: object | None = None  # the last one that was begun
        self._key = key
        self._next_steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        yielded, self.yielded = self.yielded, None
        if yielded is None:
            if self.why_not_alone:
                raise RuntimeError(self.why_not_alone)
            self.step = self.position
        for shares in self.batches():
            if yielded is None:
                self.on_direct_use()
                if self.on_batch is not None:
                    self.on_batch(self.step - 1)
                self.position = self.step
            else:
                yielded.append(self.drawn(shares[self.rank]))
            yield shares[self.rank]

    def batches(self) -> Iterator[list[list[int]]]:
        """Yields the next `steps` Poisson batches, each as `shares` returns it.

        Raises RuntimeError, and yields none, when another iteration has begun or `seek` was called.
        """
        iteration = self._iteration = object()
        steps, self._next_steps = self._next_steps, self.steps
        for step in range(self.step, self.step + steps):
            if self._iteration is not iteration:
                raise RuntimeError(OVER)
            self.step = step + 1
            yield self.shares(step)

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

    def drawn(self, rows: list[int]) -> "Drawn":
        """Returns the facts about a batch, or a part of one, that the loader needs later."""
        views = 1 if self.units is None else self.units.views
        return Drawn(len(rows), fill_of(rows, self.rows_per_unit, views))

    def rekey(self, key: bytes, start: int = 0) -> None:
        """Samples all later batches with another key, as a resumed run does.

        Args:
            start: the number of the batch at which that key came into use.
        """
        _check_sampling(key, 0, self.num_samples, self.sample_rate)
        self._key, self.start = key, start

    def seek(self, batches: range) -> None:
        """Moves to these batches: the next iteration yields them, later ones those after them."""
        self._iteration = None
        self.step = batches.start
        self._next_steps = len(batches)


def _nothing() -> None:
    """Does nothing."""


def _check_sampling(key: bytes, step: int, num_samples: int, sample_rate: float) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"key is not {KEY_BYTES} bytes: give secrets.token_bytes({KEY_BYTES})")
    if step < 0:
        raise ValueError(f"step is {step}: steps are counted from 0, give 0 or more")
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}: give 1 or more")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate is {sample_rate}: give a probability above 0, at most 1")
