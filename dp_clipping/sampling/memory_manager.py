"""Splits Poisson batches that do not fit in memory into microbatches of one step."""

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from torch.utils.data import DataLoader, IterableDataset, Sampler

from dp_clipping.kinds import instance_of, whole
from dp_clipping.sampling.collate import PaddedCollate
from dp_clipping.sampling.given_loader import kept_options
from dp_clipping.sampling.loader import PoissonLoader, sending
from dp_clipping.sampling.poisson import PoissonSampler, Uncopied
from dp_clipping.sampling.units import fill_of, units_in
from dp_clipping.sampling.usage import Ticket
from dp_clipping.trials.randomness import same_randomness


class MicrobatchSampler(Sampler[list[int]]):
    """Splits the batches of another batch sampler into pieces of nearly equal size, in order.

    Units of privacy stay whole, and so do the views of a sample. `yielded` gets what is known of
    each batch's pieces: a prefetching DataLoader takes pieces long before it yields them, and finds
    here which piece is which.
    """

    def __init__(
        self, batch_sampler: Any, max_size: int, examples_per_unit: int = 1, views: int = 1
    ) -> None:
        self.batch_sampler = batch_sampler
        self.max_size = max_size
        self.examples_per_unit, self.views = examples_per_unit, views
        self.yielded: deque[deque[Ticket]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        yielded, each = self.yielded, self.examples_per_unit
        for indices, largest in self._batches():
            pieces = split(indices, self.count(largest), each)
            yielded.append(
                deque(Ticket(len(rows), fill=fill_of(rows, each, self.views)) for rows in pieces)
            )
            yield from pieces

    def count(self, largest: int) -> int:
        """Returns the number of pieces of a batch whose largest rank has `largest` samples."""
        return max(1, -(-largest // self.max_size))

    def _batches(self) -> Iterator[tuple[list[int], int]]:
        """Yields this rank's samples of each batch, and the most that any rank has."""
        if isinstance(self.batch_sampler, PoissonSampler):
            for shares in self.batch_sampler.batches():
                yield shares[self.batch_sampler.rank], max(map(len, shares))
        else:
            for batch in self.batch_sampler:
                yield list(batch), len(batch)


@dataclass(eq=False)
class Position:
    """The position of an iteration: its batches, the number of one, and microbatches left of it."""

    epoch: range
    number: int
    left: deque[Ticket] = field(default_factory=deque)


class BatchMemoryManager(Uncopied, DataLoader):
    """Splits batches: `with BatchMemoryManager(...) as loader`, as in Opacus.

    The loader splits each batch of `data_loader` into consecutive microbatches of at most
    `max_physical_batch_size` samples (with `views=v`, rows, of which a sample has v), and before it
    yields one calls `optimizer.signal_skip_step(do_skip=...)`: False for the last of a batch, else
    True. Between the ranks of a PoissonLoader only sizes differ: where one rank needs three
    microbatches, all have three, some of them perhaps empty, if all pass the same
    `max_physical_batch_size`. A batch without samples is one empty microbatch.

    With `pad_batches` every microbatch has `max_physical_batch_size` rows: copies of its first
    sample follow, or of one of the data where it has none (`collate.PaddedCollate`). The yielded
    loader's `real` says how many samples there are. The network and the criterion compute with
    these rows, and nothing comes of them: their coefficients are 0, whatever their losses and
    gradients are, they are in no norm and no count, and a private loss prints the mean of the
    samples alone. (Mode `no_dp`, which has no coefficients, leaves their losses out.) What a loop
    computes of outputs by itself, an accuracy say, has these rows too: `outputs[: loader.real]`.
    Each forward takes a whole microbatch. Kernels then see one shape only, so no sample's gradient
    depends, in the last bits, on how many others were sampled.

    A PoissonLoader's `on_batch` is called before the first microbatch of a Poisson batch. Ending
    the iteration in the middle of a batch (`break`, an exception) drops its sums with a warning, so
    that the optimizer is between two steps, and the batch is yielded again from its beginning,
    unless a step has used a part of it. Any other DataLoader with a batch sampler is split
    likewise; its ranks must have batches of equal sizes.

    Attributes:
        real: the number of rows of the last microbatch that are samples: the first ones.
    """

    def __init__(
        self,
        *,
        data_loader: DataLoader,
        max_physical_batch_size: int,
        optimizer: Any,
        pad_batches: bool = False,
    ) -> None:
        instance_of(bool, "True or False").check("pad_batches", pad_batches)
        wanted = "the one that make_private returned"
        instance_of(DataLoader, wanted).check("data_loader", data_loader)
        whole("a whole number, 1 or more").check("max_physical_batch_size", max_physical_batch_size)
        if not hasattr(optimizer, "leave_microbatches"):
            raise ValueError(
                f"optimizer is a {type(optimizer).__name__} and cannot skip steps: give the one "
                "that make_private returned"
            )
        model = optimizer.model
        each = model.examples_per_unit
        units_in("max_physical_batch_size", max_physical_batch_size, each)
        if isinstance(data_loader, BatchMemoryManager):
            raise ValueError("data_loader is split already: give the one before")
        if isinstance(data_loader.dataset, IterableDataset) or data_loader.batch_sampler is None:
            raise ValueError(
                "data_loader has no batch sampler whose batches could be split: give a dataset "
                "with __getitem__ and a batch_size"
            )
        collate = data_loader.collate_fn
        if pad_batches:
            # A resumed run splits more often: what the sample draws would move its dropout.
            with same_randomness():
                collate = PaddedCollate(
                    collate, data_loader.dataset[0], batch_dim=0 if model.batch_first else 1,
                    rows=max_physical_batch_size,
                )  # fmt: skip
        super().__init__(
            data_loader.dataset,
            batch_sampler=MicrobatchSampler(
                data_loader.batch_sampler, max_physical_batch_size, each, model.views
            ),
            collate_fn=collate,
            **kept_options(data_loader),
        )
        self.real = 0
        self._rows = max_physical_batch_size if pad_batches else None
        self._loader, self.optimizer = data_loader, optimizer
        self._place: Position | None = None  # of the iteration in progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        if self._rows is not None:
            self.optimizer.step_state.usage.end_padding()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.leave()
        poisson = self._poisson
        epoch = poisson.start_epoch() if poisson else range(0)
        place = self._place = Position(epoch, epoch.start)
        # Of this iteration alone: one that was left early cannot disturb it.
        yielded = self.batch_sampler.yielded = deque()
        try:
            with sending(self, poisson.checked if poisson else None):
                batches = super().__iter__()
            while True:
                with poisson.reading(place.number, len(place.left)) if poisson else nullcontext():
                    found = next(batches, None)
                if found is None:
                    break
                batch, alone = found
                first = not place.left
                if first and poisson and poisson.is_over():
                    break
                left = place.left or yielded.popleft()
                if poisson:
                    poisson.hand_over(
                        place.number, left[0], batch, alone, first=first,
                        rows=self._rows, largest=self.batch_sampler.max_size,
                    )  # fmt: skip
                self.real = left.popleft().samples
                if not poisson and self._rows is not None:
                    self.optimizer.step_state.usage.ticket = Ticket(self.real, rows=self._rows)
                place.left = left
                self.optimizer.signal_skip_step(do_skip=bool(left))
                yield batch
                if self._place is not place:
                    raise RuntimeError("this iteration was left: begin another")
                if poisson:
                    poisson.check_last(epoch)
                place.number += not left
            if self._rows is not None:  # the last microbatch is done
                self.optimizer.step_state.usage.end_padding()
        finally:
            self.leave(place)

    @property
    def _poisson(self) -> PoissonLoader | None:
        return self._loader if isinstance(self._loader, PoissonLoader) else None

    def leave(self, place: Position | None = None) -> None:
        """Ends the iteration in progress, if it is the one at `place`."""
        current = self._place
        if current is None or place not in (None, current):
            return
        self._place, poisson, half_way = None, self._poisson, bool(current.left)
        if poisson and not half_way and poisson.batch_sampler.epoch is not current.epoch:
            return  # its microbatches are done, and those of a newer iteration are under way
        if self.optimizer.leave_microbatches(half_way):
            warnings.warn(
                f"Poisson batch {current.number} was left after some of its microbatches: what "
                "they added to the gradients is dropped, and no step was made of it",
                stacklevel=2,
            )
        if half_way and poisson:
            poisson.usage.take_back()  # the batch comes again, as another object

    def __len__(self) -> int:
        """Returns the microbatches of the iteration in progress, otherwise of the next one.

        At the cost of sampling the epoch of a PoissonLoader once more. Raises TypeError for other
        loaders, of whose batches nothing is known.
        """
        poisson, sampler = self._poisson, self.batch_sampler
        if poisson is None:
            raise TypeError(
                "its microbatches are not known: use len() of the loader before the split"
            )
        epoch = poisson.coming_epoch() if self._place is None else self._place.epoch
        shares = map(sampler.batch_sampler.shares, epoch)
        return sum(sampler.count(max(map(len, share))) for share in shares)


def split(indices: list[int], count: int, each: int = 1) -> list[list[int]]:
    """Returns `count` consecutive parts whose lengths differ by at most `each`, and are multiples.

    The last one is smaller if the batch is not a multiple.
    """
    bounds = [len(indices) // each * i // count * each for i in range(count)] + [len(indices)]
    return [indices[start:stop] for start, stop in pairwise(bounds)]
