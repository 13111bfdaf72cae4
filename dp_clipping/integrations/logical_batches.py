"""Poisson batches, each as the iterator of its microbatches: one optimizer step each."""

from collections.abc import Generator, Iterator
from typing import Any

from dp_clipping.sampling.loader import PoissonLoader
from dp_clipping.sampling.memory_manager import BatchMemoryManager


class Microbatches:
    """The microbatches of one Poisson batch: iterate once, and run a backward for each.

    `optimizer.step()` is called after each; only the last one's is a step.

    Attributes:
        is_last: the microbatch that was yielded last is the last one.
        samples: in that microbatch, without those that pad it.
    """

    def __init__(self, first: Any, rest: Iterator[Any], loader: Any, optimizer: Any):
        self._first, self._rest, self._loader = first, rest, loader
        self._state = optimizer.step_state

    @property
    def is_last(self) -> bool:
        return not self._state.skips_next

    @property
    def samples(self) -> int:
        return self._loader.real

    def __iter__(self) -> Iterator[Any]:
        piece = self._first
        while True:
            is_last = self.is_last  # asked now: a step uses the signal up
            yield piece
            if is_last:
                return
            piece = next(self._rest)


class LogicalBatches:
    """Yields `Microbatches` for each Poisson batch of a loader; its length counts these.

    Args:
        loader: as `make_private` has returned it.
        optimizer: as `make_private` has returned it.
        max_physical_batch_size: samples of a microbatch, at most.
        pad_batches: each microbatch has so many rows; see `BatchMemoryManager`.
    """

    def __init__(
        self, loader: PoissonLoader, optimizer: Any, max_physical_batch_size: int, pad_batches: bool
    ):
        self.loader = loader
        self._manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=max_physical_batch_size,
            optimizer=optimizer, pad_batches=pad_batches,
        )  # fmt: skip
        self._current: Generator[Microbatches, None, None] | None = None

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Microbatches]:
        """Begins an iteration, and ends the one before.

        A loop that counts its steps leaves that one after its last batch. Ended by garbage
        collection, it would end the new one.
        """
        if self._current is not None:
            self._current.close()
        self._current = self._batches()
        return self._current

    def _batches(self) -> Generator[Microbatches, None, None]:
        with self._manager as pieces:
            rest = iter(pieces)
            for first in rest:
                yield Microbatches(first, rest, pieces, self._manager.optimizer)
