"""Splits Poisson batches that do not fit in memory into microbatches of one step."""

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from dp_clipping.kinds import instance_of, whole
from dp_clipping.sampling.collate import PaddedCollate
from dp_clipping.sampling.collate_check import sending
from dp_clipping.sampling.loader import PoissonLoader, kept_options
from dp_clipping.sampling.poisson import Drawn, PoissonSampler, Uncopied
from dp_clipping.sampling.units import fill_of
from dp_clipping.sampling.usage import Ticket
from dp_clipping.trials.randomness import same_randomness


class BatchMemoryManager:
    """Splits batches: `with BatchMemoryManager(...) as loader`, as in Opacus.

    The loader splits each batch of `data_loader` into consecutive microbatches of at most
    `max_physical_batch_size` samples (with `views=v`, rows, of which a sample has v), and before it
    yields one calls `optimizer.signal_skip_step(do_skip=...)`: False for the last of a batch, else
    True. Between the ranks of a PoissonLoader only sizes differ: where one rank needs three
    microbatches, all have three, some of them perhaps empty, if all pass the same
    `max_physical_batch_size`. A batch without samples is one empty microbatch.

    With `pad_batches` every microbatch has `max_physical_batch_size` rows: zeros follow the samples
    (`collate.PaddedCollate`), of which the yielded loader's `real` says how many there are. The
    network and the criterion compute with these rows, and nothing comes of them: their coefficients
    are 0, whatever their losses and gradients are, they are in no norm and no count, and a private
    loss prints the mean of the samples alone. (Mode `no_dp`, which has no coefficients, leaves
    their losses out.) What a loop computes of outputs by itself, an accuracy say, has these rows
    too: `outputs[: loader.real]`. Each forward takes a whole microbatch. Kernels then see one shape
    only, so no sample's gradient depends, in the last bits, on how many others were sampled.

    A PoissonLoader's `on_batch` is called before the first microbatch of a Poisson batch, and its
    `position` moves with the last one. Ending the iteration in the middle of a batch (`break`, an
    exception) drops its sums with a warning, so that the optimizer is between two steps, and the
    batch is yielded again from its beginning, unless a step has used a part of it. Any other
    DataLoader with a batch sampler is split likewise; its ranks must have batches of equal sizes.
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
        if max_physical_batch_size % each:
            least = max_physical_batch_size // each * each
            fits = f"{least} or {least + each}" if least else each
            units = f"{each} rows of each unit"
            if model.views > 1:
                units += f", {model.views} views of each example"
            raise ValueError(
                f"max_physical_batch_size is {max_physical_batch_size}, and a physical batch holds "
                f"{units}: give {fits}"
            )
        if isinstance(data_loader, MicrobatchLoader):
            raise ValueError("data_loader is split already: give the one before")
        if isinstance(data_loader.dataset, IterableDataset) or data_loader.batch_sampler is None:
            raise ValueError(
                "data_loader has no batch sampler whose batches could be split: give a dataset "
                "with __getitem__ and a batch_size"
            )
        self.data_loader = data_loader
        self.max_physical_batch_size = max_physical_batch_size
        self.optimizer = optimizer
        self.pad_batches = pad_batches
        self._entered: list[MicrobatchLoader] = []

    def __enter__(self) -> "MicrobatchLoader":
        loader = MicrobatchLoader(
            self.data_loader, self.max_physical_batch_size, self.optimizer, self.pad_batches
        )
        self._entered.append(loader)
        return loader

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().leave()
        if self.pad_batches:
            self.optimizer.step_state.usage.end_padding()


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
        self.yielded: deque[deque[Drawn]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        yielded, each = self.yielded, self.examples_per_unit
        for indices, largest in self._batches():
            pieces = split(indices, self.count(largest), each)
            fills = (fill_of(piece, each, self.views) for piece in pieces)
            yielded.append(deque(map(Drawn, map(len, pieces), fills)))
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
    """The position of an iteration: number of its batch, and its remaining microbatches."""

    number: int
    left: deque[Drawn] = field(default_factory=deque)
    steps: int = 0
    """Released before this batch, as the loader's usage counts them."""


class MicrobatchLoader(Uncopied, DataLoader):
    """The loader that `BatchMemoryManager` yields.

    Attributes:
        real: the number of rows of the last microbatch that are samples: the first ones.
    """

    def __init__(
        self, loader: DataLoader, max_size: int, optimizer: Any, pad_batches: bool
    ) -> None:
        collate, model = loader.collate_fn, optimizer.model
        if pad_batches:
            batch_dim = 0 if model.batch_first else 1
            # A resumed run splits more often: what the sample draws would move its dropout.
            with same_randomness():
                collate = PaddedCollate(
                    collate, loader.dataset[0], batch_dim=batch_dim, rows=max_size
                )
        super().__init__(
            loader.dataset,
            batch_sampler=MicrobatchSampler(
                loader.batch_sampler, max_size, model.examples_per_unit, model.views
            ),
            collate_fn=collate,
            **kept_options(loader),
        )
        self.real = 0
        self._rows = max_size if pad_batches else None
        self._loader = loader
        self._optimizer = optimizer
        self._place: Position | None = None  # of the iteration in progress
        self._epoch: range | None = None  # of the iteration in progress
        self._counted = (range(0), 0)  # (batches, their microbatches) at the last call of `len`

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.leave()
        poisson = self._poisson
        epoch = poisson.start_epoch() if poisson else range(0)
        self._epoch = epoch if poisson else None
        place = self._place = Position(epoch.start)
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
                    before = poisson.usage.steps
                    poisson.hand_over(
                        place.number, left[0], batch, alone, first=first, last=len(left) == 1,
                        rows=self._rows, largest=self.batch_sampler.max_size,
                    )  # fmt: skip
                    place.steps = before if first else place.steps
                self.real = left.popleft().rows
                if not poisson and self._rows is not None:
                    self._optimizer.step_state.usage.ticket = Ticket(self.real, rows=self._rows)
                place.left = left
                self._optimizer.signal_skip_step(do_skip=bool(left))
                yield batch
                if self._place is not place:
                    raise RuntimeError("this iteration was left: begin another")
                if poisson:
                    poisson.check_last(epoch)
                place.number += not left
            if self._rows is not None:  # the last microbatch is done
                self._optimizer.step_state.usage.end_padding()
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
        epoch, poisson, half_way = self._epoch, self._poisson, bool(current.left)
        self._place = self._epoch = None
        if poisson and not half_way and not poisson.is_last(epoch):
            return  # its microbatches are done, and those of a newer iteration are under way
        if half_way and poisson and poisson.usage.steps > current.steps:
            poisson.position = max(poisson.position, current.number + 1)
        if self._optimizer.leave_microbatches(half_way):
            warnings.warn(
                f"Poisson batch {current.number} was left after some of its microbatches: what "
                "they added to the gradients is dropped, and no step was made of it",
                stacklevel=2,
            )
        if half_way and poisson:
            poisson.usage.take_back()  # the batch comes again, as another object

    def __len__(self) -> int:
        """Returns the microbatches of the iteration in progress, otherwise of the next one.

        Known of Poisson batches, at the cost of sampling the epoch of a PoissonLoader once more,
        and where torch's BatchSampler says what it gives. Raises TypeError for other batch
        samplers.
        """
        if isinstance(self._loader, PoissonLoader):
            return self._count_pieces(self._epoch or self._loader.coming_epoch())
        sampler = self.batch_sampler
        batches = sampler.batch_sampler
        if type(batches) is not BatchSampler:
            raise TypeError(
                f"how a {type(batches).__name__} fills its batches is not known, and so not their "
                "number of microbatches: use len() of the loader before the split"
            )
        indices: Any = batches.sampler
        full, rest = divmod(len(indices), batches.batch_size)
        length = full * sampler.count(batches.batch_size)
        return length if batches.drop_last or not rest else length + sampler.count(rest)

    def _count_pieces(self, batches: range) -> int:
        if self._counted[0] != batches:
            sampler = self.batch_sampler
            shares = map(sampler.batch_sampler.shares, batches)
            self._counted = batches, sum(sampler.count(max(map(len, share))) for share in shares)
        return self._counted[1]


def split(indices: list[int], count: int, each: int = 1) -> list[list[int]]:
    """Returns `count` consecutive parts whose lengths differ by at most `each`, and are multiples.

    The last one is smaller if the batch is not a multiple.
    """
    bounds = [len(indices) // each * i // count * each for i in range(count)] + [len(indices)]
    return [indices[start:stop] for start, stop in pairwise(bounds)]
