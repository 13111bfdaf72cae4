"""Samples that are collated alone, beside their batch: whether they are padded there is compared.

See `guard.lengths`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy as copied
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dp_clipping.trials.holders import held_by
from dp_clipping.trials.randomness import RandomStates

LENGTHS = 8  # samples that are collated alone
SIZES = 256  # samples whose sizes are looked at
PLAIN = (bool, int, float, complex, str, bytes, np.generic)
NUMBERS = ("b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")


class Alone(NamedTuple):
    """Samples of a batch, each collated alone: they are not padded for the others.

    Attributes:
        size: the number of samples in the batch.
        places: of these samples among them.
        batches: one of each of these samples.
        random: whether each of the batch's tensors (`beside`) has random numbers.
        batch_dim: the dimension of tensors that counts the samples.
    """

    size: int
    places: tuple[int, ...]
    batches: tuple[Any, ...]
    random: tuple[bool, ...]
    batch_dim: int


def collated_alone(
    collate_fn: Callable[[list], Any], size: int, chosen: dict[int, Any], batch: Any, batch_dim: int
) -> Alone | None:
    """Collates the chosen samples of a batch alone, and keeps a few of them.

    These are one that has the lengths of the batch, if there is one, and of the others the
    one that differs most; the one that differs least, as a network may need some length; and
    the one that fills its batch best: of a length that is a multiple of 8, say.

    Args:
        size: the number of samples in the batch.
        chosen: place -> sample.

    Returns:
        None: they have the lengths of the batch, or cannot be collated alone.
    """
    # Most functions cannot make a batch of what they leave out.
    with CollateState(collate_fn) as state, suppress(Exception):
        alone = {}
        for place, sample in chosen.items():
            state.restore()
            alone[place] = collate_fn([copied(sample)])
        differ = {place: difference(batch, one, size, batch_dim) for place, one in alone.items()}
        others = [place for place in alone if differ[place]]
        if not others:
            return None
        most = max(others, key=differ.__getitem__)
        full = max(others, key=lambda n: size_of(chosen[n]) / max(1, size_of(alone[n])))
        long = [place for place in alone if not differ[place]][:1]
        near = min(others, key=differ.__getitem__)
        places = dict.fromkeys([*long, most, near, full])
        # Twice, with the numbers that follow: generators that are not known differ, too.
        twice = [collate_fn(list(map(copied, chosen.values()))) for _ in range(2)]
        random = tuple(not equal(x, y) for x, y in beside(*twice))
        batches = tuple(alone[place] for place in places)
        return Alone(size, tuple(places), batches, random, batch_dim)
    return None


class CollateState:
    """The state at which calls of a collate function begin.

    That is the random generators, those of the function's object and of a partial's arguments too,
    and plain values among that object's attributes, as a counter. As a context it is set back at
    the end.
    """

    def __init__(self, collate_fn: Callable[[list], Any]) -> None:
        owners: list[Any] = []
        while isinstance(collate_fn, partial):
            given = [*collate_fn.args, *collate_fn.keywords.values()]
            owners.append(SimpleNamespace(**{str(n): value for n, value in enumerate(given)}))
            collate_fn = collate_fn.func
        own = getattr(collate_fn, "__self__", collate_fn)
        self._attributes: dict[str, Any] = {}
        if isinstance(getattr(own, "__dict__", None), dict):  # a class has another one
            owners.append(own)
            self._attributes = vars(own)
        self._plain = {n: v for n, v in self._attributes.items() if isinstance(v, PLAIN)}
        self._random = RandomStates(owners)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Sets everything back."""
        self._random.restore()
        self._attributes.update(self._plain)

    @property
    def has_drawn(self) -> bool:
        """Returns whether random numbers were drawn since `restore`."""
        return self._random.have_moved


def beside(whole: Any, one: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tensors of a batch with those of a batch of one of its samples.

    Arrays, whole numbers and packed sequences become tensors. Lists with an entry for each sample
    are left out: nothing in them is padded.
    """
    if isinstance(whole, PackedSequence):
        yield (
            pad_packed_sequence(whole, batch_first=True)[0],
            pad_packed_sequence(one, batch_first=True)[0],
        )
    elif isinstance(whole, Tensor) and isinstance(one, Tensor):
        if whole.layout is one.layout is torch.strided:
            yield whole, one
    elif isinstance(whole, np.ndarray) and isinstance(one, np.ndarray):
        if whole.dtype.str[1:] in NUMBERS:
            native = whole.dtype.newbyteorder("=")
            yield torch.from_numpy(whole.astype(native)), torch.from_numpy(one.astype(native))
    elif type(whole) is type(one) is int:
        yield torch.tensor(whole, device="cpu"), torch.tensor(one, device="cpu")
    elif isinstance(whole, Mapping):
        for key in whole:
            if key in one:
                yield from beside(whole[key], one[key])
    elif isinstance(whole, list | tuple) and len(whole) == len(one):
        for entries in zip(whole, one, strict=True):
            yield from beside(*entries)
    elif is_dataclass(whole) and type(whole) is type(one):
        for name, value in held_by(whole).items():
            yield from beside(value, getattr(one, name))


def sample_dim(whole: Tensor, one: Tensor, size: int, batch_dim: int) -> int | None:
    """Returns the dimension that counts the samples of a batch; None: there is none."""
    for dim in dict.fromkeys((batch_dim, *range(whole.dim()))):
        if dim < whole.dim() and (whole.shape[dim], one.shape[dim]) == (size, 1):
            return dim
    return None


def equal(x: Tensor, y: Tensor) -> bool:
    """Returns whether the values are the same, on any device; NaN is equal to NaN."""
    return torch.equal(x.nan_to_num(), y.to(x).nan_to_num())


def difference(batch: Any, one: Any, size: int, batch_dim: int) -> int:
    """Returns how much the lengths of a sample alone differ from those of its batch."""
    found = 0
    for x, y in beside(batch, one):
        if x.dim() == y.dim():
            own = sample_dim(x, y, size, batch_dim)
            pairs = enumerate(zip(x.shape, y.shape, strict=True))
            found += sum(abs(n - m) for d, (n, m) in pairs if d != own)
    return found


def chosen_of(samples: list) -> dict[int, Any]:
    """Returns copies of up to `LENGTHS` samples of different sizes, by their places.

    They are found among up to `SIZES`, at places without a pattern: a look costs the same however
    large the batch is.
    """
    size = len(samples)
    some = np.random.default_rng(size).choice(size, min(SIZES, size), replace=False).tolist()
    sizes = {size_of(samples[place]): place for place in sorted(some)}
    places = [sizes[size] for size in sorted(sizes)]
    last, count = len(places) - 1, min(LENGTHS, len(places))
    chosen = (places[i * last // max(1, count - 1)] for i in range(count))
    return {place: copied(samples[place]) for place in chosen}


def size_of(sample: Any) -> int:
    """Returns how many numbers, characters or objects a sample has."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.size
    if isinstance(sample, Mapping):
        return sum(map(size_of, sample.values()))
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, list | tuple):
        return sum(map(size_of, sample))
    if is_dataclass(sample) and not isinstance(sample, type):
        return sum(map(size_of, held_by(sample).values()))
    return 1
