"""The user's DataLoader with Poisson batches; tracks the position and the batches that were used.

poisson.py chooses the samples of a batch, collate.py makes a batch without samples.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader

from dp_clipping.sampling.collate import CollateWithEmpty
from dp_clipping.sampling.collate_check import CheckedCollate, Collated
from dp_clipping.sampling.given_loader import check_loader, kept_options
from dp_clipping.sampling.poisson import PoissonSampler, Scheme, Uncopied
from dp_clipping.sampling.units import Units
from dp_clipping.sampling.usage import SampleUsage, Ticket
from dp_clipping.trials.randomness import same_randomness, seed_all

ENDED = (
    "no batch is left: the steps that target_epsilon is for are taken, and stop=True ends the "
    "training there"
)
ANOTHER = (
    "another loader takes this one's batches (Opacus's BatchMemoryManager?), and {what}: use "
    "dp_clipping.BatchMemoryManager, or {instead}"
)
OVER = (
    "another iteration of this loader, or load_state_dict, has ended this one: use one at a time, "
    "the last that was begun"
)
IN_VAIN = 100  # iterations in a row that begin with one batch, at which the next is refused
AGAIN = (
    "{times} iterations of the loader in a row began with batch {number}, and no step has used it: "
    "a batch cannot be left out, since ε does not cover a choice among batches, so make a step of "
    "each, of small and empty ones too; to look at batches take several of one iteration, for x, y "
    "in loader:, after model.eval()"
)
CHANGED = (
    "data_loader.dataset had {before} samples at make_private and has {now} now, while batches are "
    "drawn of {before}: keep the data as they are during training"
)
PREPARED = (
    "what make_private returns needs no accelerator.prepare(), which would deal out Poisson "
    "batches and skip steps: call engine.make_private(module=model, optimizer=optimizer, "
    "data_loader=loader, ..) with what was not prepared, and use what it returns; in place of "
    "accelerator.accumulate(model) use BatchMemoryManager"
)


def _collated(
    collate_fn: Callable[[list], Any], checked: CheckedCollate | None, samples: list
) -> Collated:
    """Collates samples by a function around `checked`, with what that has collated alone."""
    batch, alone = collate_fn(samples), None
    if checked is not None and len(samples):
        alone, checked.alone = checked.alone, None
    return batch, alone


@contextmanager
def sending(loader: DataLoader, checked: CheckedCollate | None) -> Iterator[None]:
    """Enters a context in which the loader begins iterations that yield `Collated`."""
    own, loader.collate_fn = loader.collate_fn, partial(_collated, loader.collate_fn, checked)
    try:
        yield
    finally:
        loader.collate_fn = own


class PoissonLoader(Uncopied, DataLoader):
    """The user's loader with Poisson batches, or those of another scheme, in place of its own.

    Each iteration begins at the first batch that was never yielded. In training a batch that was
    yielded for a step which was not made comes again: a loop could otherwise choose among batches,
    as by their size, and ε does not cover a choice. Where a scheme's batches are in order, training
    begins at the first one that no step has used. `hand_over` reports each batch before it is
    yielded: to `on_batch`, which refuses a second batch before the step of the first, and to
    `usage`, which the model checks before each backward. A checkpoint saves `state_dict()`.

    Args:
        loader: the user's; what is not named here stays as it is there, but for `drop_last`, which
            means nothing here.
        key: the sampling key of the run, 32 bytes.
        sample_rate: q; default: 1/len(loader).
        steps: of an epoch; default: len(loader).
        rank, world_size: they count data-parallel ranks.
        batch_first: False: tensors of inputs have their batch in dimension 1.
        rand_on_empty: a batch without samples has one of random zeros and ones; otherwise zero
            length in the shape that the collate function makes.
        units: what is sampled; default: each example is a unit.
        scheme: chooses the batches; default: `Poisson`.
        checks: when the collate function is checked; see `trials.schedule.Schedule`.

    Attributes:
        on_batch: called with the number of a batch just before its (first) part is yielded, in the
            main process; what it raises is raised instead of yielding the batch.
        is_training: returns whether what is yielded is for a step.
        is_over: returns whether the training has ended, so that no batch follows.
        usage: which samples of the last batch no backward has used.
        checked: the user's collate function, as it is called.

    Raises:
        ValueError: with what to use in its place, for a loader whose data cannot be sampled by
            index, and samplers that do not visit every sample alike.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        key: bytes,
        sample_rate: float | None = None,
        steps: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        units: Units | None = None,
        scheme: Scheme | None = None,
        checks: str = "first",
    ) -> None:
        check_loader(loader, world_size)
        sampler = PoissonSampler(
            num_samples=len(loader.dataset) if units is None else len(units),
            sample_rate=1 / len(loader) if sample_rate is None else sample_rate,
            steps=len(loader) if steps is None else steps,
            key=key,
            rank=rank,
            world_size=world_size,
            units=units,
            scheme=scheme,
        )
        options = kept_options(loader)
        # Worker seeds would otherwise be taken from torch's global stream at each start of an
        # iteration: the user's seed may be known, and a resumed run starts once more than one that
        # was not interrupted.
        self._owns_generator = options["generator"] is None
        if self._owns_generator:
            options["generator"] = torch.Generator()
        dataset, batch_dim = loader.dataset, 0 if batch_first else 1
        self._length = len(dataset)
        self.checked = CheckedCollate(
            loader.collate_fn,
            batch_dim=batch_dim,
            in_order=sampler.rows_per_unit > 1,
            level=checks,
        )
        collate = CollateWithEmpty(
            self.checked, dataset[0], batch_dim=batch_dim, dummy=rand_on_empty
        )
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        self.rand_on_empty = rand_on_empty
        self.on_batch: Callable[[int], object] = lambda number: None
        self.usage = SampleUsage()
        self.is_training: Callable[[], bool] = lambda: False
        self.is_over: Callable[[], bool] = lambda: False
        sampler.to_another = self._to_another
        self._epoch_end = 0  # of the last iteration that was begun
        self._in_vain = 0  # iterations in training whose first batch no step has used

    @property
    def sample_rate(self) -> float:
        return self.batch_sampler.sample_rate

    @property
    def position(self) -> int:
        """Returns the number of the batch that an iteration in training would begin with."""
        return self.usage.next(self.is_training(), self.batch_sampler.scheme.in_order)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raises RuntimeError: `accelerator.prepare` asks for it, and would deal out batches."""
        raise RuntimeError(PREPARED)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.start_epoch()
        # Of this iteration alone: one that was left early cannot disturb it.
        yielded = self.batch_sampler.yielded = deque()
        with sending(self, self.checked):
            batches = super().__iter__()
        for number in count(epoch.start):
            with self.reading(number):
                found = next(batches, None)
            if found is None:
                return
            batch, alone = found
            if self.is_over():
                if number == epoch.start:
                    warnings.warn(ENDED, stacklevel=2)
                return
            self.hand_over(number, yielded.popleft(), batch, alone)
            yield batch
            self.check_last(epoch)

    def _to_another(self) -> Iterator[list[int]]:
        """Yields this rank's part of each batch to a loader that splits it by `signal_skip_step`.

        Opacus's `BatchMemoryManager` does, as it fetches.
        """
        rows_per_unit, workers = self.batch_sampler.rows_per_unit, self.num_workers
        if workers:
            what = f"num_workers={workers} would fetch ahead of the steps"
            raise RuntimeError(ANOTHER.format(what=what, instead="num_workers=0"))
        if rows_per_unit > 1:
            what = f"it would split units of {rows_per_unit} rows"
            raise RuntimeError(ANOTHER.format(what=what, instead="examples_per_unit=1 and views=1"))
        epoch = self.start_epoch()
        for number, shares in zip(epoch, self.batch_sampler.batches(), strict=True):
            if self.is_over():
                return
            rows = shares[self.batch_sampler.rank]
            self.hand_over(number, Ticket(len(rows), same_parts=False), None, None)
            yield rows
            self.check_last(epoch)

    @contextmanager
    def reading(self, number: int, part: int = 0) -> Iterator[None]:
        """Enters a context in which samples are read: what that draws is a function of the key.

        Otherwise whoever knows the user's seed would know which rows of a batch get which numbers,
        and these change with who else is in the batch. Generators go on afterwards as before. In
        workers the key seeds them when an iteration begins, or the loader's own `generator` does.

        Args:
            number, part: of the batch, and of the microbatch in it.
        """
        if self.num_workers:
            yield
            return
        with same_randomness():
            seed_all(self.batch_sampler.seed(number, part), only_cpu=True)
            yield

    def check_last(self, epoch: range) -> None:
        """Raises RuntimeError if another iteration was begun since `start_epoch` returned `epoch`.

        Called before an iteration takes a batch: persistent workers are shared with later ones.
        """
        if epoch is not self.batch_sampler.epoch:
            raise RuntimeError(OVER)

    def coming_epoch(self) -> range:
        """Returns the batch numbers of the next iteration: the rest of a loaded epoch, or one."""
        start = self.position if self.is_training() else self.usage.shown
        epoch = self.batch_sampler.epoch
        if epoch is not None and start == epoch.start:
            return epoch  # nothing of it was used
        is_rest = epoch is None and start < self._epoch_end
        return range(start, self._epoch_end if is_rest else start + len(self))

    def start_epoch(self) -> range:
        """Begins an iteration where the user is, whatever was prefetched; returns its batches."""
        if len(self.dataset) != self._length:
            raise RuntimeError(CHANGED.format(before=self._length, now=len(self.dataset)))
        if self.usage.refusal and self.is_training():
            raise RuntimeError(self.usage.refusal)
        coming = self.coming_epoch()
        # Another object also if it is equal: it tells this iteration from others.
        epoch = self.batch_sampler.epoch = range(coming.start, coming.stop)
        self._epoch_end = epoch.stop
        if self.is_training():
            self._in_vain = self._in_vain + 1 if self.usage.is_owed else 0
            if self._in_vain == IN_VAIN:
                self._in_vain = 0
                raise RuntimeError(AGAIN.format(number=epoch.start, times=IN_VAIN))
            self.usage.due = epoch.start
        if self._owns_generator:
            self.generator.manual_seed(self.batch_sampler.seed(epoch.start))
        return epoch

    def hand_over(
        self, number: int, ticket: Ticket, batch: Any, alone: Any, *, first: bool = True,
        rows: int | None = None, largest: int | None = None,
    ) -> None:  # fmt: skip
        """Announces batch `number`, or a microbatch of it (the `first`?), before it is yielded.

        Args:
            ticket: its samples; without any it is a made-up one, if `rand_on_empty`.
            batch: what is yielded.
            alone: samples of it that were collated alone; None: there are none.
            rows, largest: as of `Ticket`.
        """
        if first:
            self.on_batch(number)
            self.usage.begin(number, self.is_training())
        if not first and number < self.usage.due:
            raise RuntimeError(
                f"a step has used a part of Poisson batch {number} and would be followed by one on "
                "the rest: call optimizer.step() once after each microbatch, it skips all but the "
                "last"
            )
        self.usage.hand_over(replace(
            ticket, number=number, rows=rows, largest=largest,
            is_dummy=self.rand_on_empty and not ticket.samples,
            alone=None if alone is None else (batch, alone),
        ))  # fmt: skip

    def state_dict(self) -> dict[str, int | float]:
        """Returns the position in the data: without the key, and the same on every rank."""
        return {
            "position": self.position,
            "epoch_end": self._epoch_end,
            "num_samples": self.batch_sampler.num_samples,
            "sample_rate": self.sample_rate,
        }

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Continues where the state was saved, with the rest of that epoch.

        With the same key the same batches follow. Of a state behind the batch that the next step
        must have nothing is loaded, and the next iteration raises RuntimeError, unless
        `engine.load_checkpoint` has set the run to it before.

        Raises:
            ValueError: for the state of before a batch that a step has used or passed over.
        """
        due = self.usage.due
        must = self.usage.is_owed or self.batch_sampler.scheme.in_order
        if state["position"] > due and must:
            # Lightning calls this before the user's hook that calls engine.load_checkpoint.
            self.usage.refusal = (
                f"data_loader was set to batch {state['position']}, and the next step must have "
                f"batch {due}, as ε does not cover a choice among batches: call "
                "engine.load_checkpoint, which sets a run to a saved step with its batch, or leave "
                "it where it is: data_loader.load_state_dict(data_loader.state_dict())"
            )
            return
        if state["position"] < due:
            raise ValueError(
                f"data_loader would be set back to batch {state['position']}, and steps have used, "
                f"or passed over, those before batch {due}, which no other may have: leave it "
                "where it is; engine.load_checkpoint sets a run back, with its steps"
            )
        self._epoch_end = state["epoch_end"]
        self.usage.restart(state["position"])
        self.batch_sampler.epoch = None
