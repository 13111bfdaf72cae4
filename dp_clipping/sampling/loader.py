"""The user's DataLoader with Poisson batches; tracks the position and the batches that were used.

poisson.py chooses the samples of a batch, collate.py makes a batch without samples.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Self

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from dp_clipping.kinds import is_count
from dp_clipping.sampling.collate import CollateWithEmpty
from dp_clipping.sampling.collate_check import CheckedCollate, sending
from dp_clipping.sampling.poisson import OVER, Drawn, PoissonSampler, Scheme, Uncopied
from dp_clipping.sampling.units import Units
from dp_clipping.sampling.usage import SampleUsage, Ticket
from dp_clipping.trials.randomness import same_randomness, seed_all

ENDED = (
    "no batch is left: the steps that target_epsilon is for are taken, and stop=True ends the "
    "training there"
)
PREPARED = (
    "what make_private returns needs no accelerator.prepare(), which would deal out Poisson "
    "batches and skip steps: call engine.make_private(module=model, optimizer=optimizer, "
    "data_loader=loader, ..) with what was not prepared, and use what it returns; in place of "
    "accelerator.accumulate(model) use BatchMemoryManager"
)

IN_VAIN = 100  # iterations in a row that begin with one batch, at which the next is refused
AGAIN = (
    "{times} iterations of the loader in a row began with batch {number}, and no step has used it: "
    "a batch cannot be left out, since ε does not cover a choice among batches, so make a step of "
    "each, of small and empty ones too; to look at batches take several of one iteration, for x, y "
    "in loader:, after model.eval()"
)


class PoissonLoader(Uncopied, DataLoader):
    """A DataLoader that yields Poisson batches, or those of another scheme, for `make_private`.

    `from_data_loader` makes it of the user's loader. Each iteration begins at the current position
    (`start_epoch`), or with a batch that was left and is to be in a step. With a scheme
    that is `in_order` it begins at the first batch that no step has used. `hand_over` reports each
    batch before it is yielded: to `on_batch`, which refuses a second batch before the step of the
    first, and to `usage`, which the model checks before each backward. A checkpoint saves
    `state_dict()`. Six of its methods are properties that the sampler answers.

    Attributes:
        sample_rate: q.
        position: how many batches were yielded to the user, over all epochs; also by another loader
            (Opacus's BatchMemoryManager) that takes this one's.
        on_batch: called with the number of a Poisson batch just before its (first) part is yielded,
            in the main process; what it raises is raised instead of yielding the batch.
        is_training: returns whether a batch that begins is for a step; None: no step uses any.
        is_over: returns whether the training has ended, so that no batch follows.
        usage: which samples of the last batch no backward has used.
        checked: the user's collate function, as it is called.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        sampler: PoissonSampler,
        collate_fn: Callable[[list], Any],
        batch_first: bool = True,
        rand_on_empty: bool = False,
        **options,
    ) -> None:
        # Worker seeds would otherwise be taken from torch's global stream at each start of an
        # iteration: the user's seed may be known, and a resumed run starts once more than one that
        # was not interrupted.
        self._owns_generator = options.get("generator") is None
        if self._owns_generator:
            options["generator"] = torch.Generator()
        batch_dim = 0 if batch_first else 1
        checked = CheckedCollate(
            collate_fn, batch_dim=batch_dim, in_order=sampler.rows_per_unit > 1
        )
        self.checked = checked
        collate = CollateWithEmpty(checked, dataset[0], batch_dim=batch_dim, dummy=rand_on_empty)
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        sampler.why_not_alone = _why_not_alone(self.num_workers, rand_on_empty, sampler)
        self.rand_on_empty = rand_on_empty
        self.usage = SampleUsage()
        self.is_training: Callable[[], bool] | None = None
        self.is_over: Callable[[], bool] = lambda: False
        sampler.on_direct_use = self.usage.forget
        self._epoch: range | None = None  # of the last iteration that was begun
        self._epoch_end = 0
        self._resuming = False
        self._in_vain = 0  # iterations in a row that began with a batch that no step has used

    @classmethod
    def from_data_loader(
        cls,
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
    ) -> Self:
        """Returns the user's loader with Poisson batches in place of its own; the rest stays.

        q is `sample_rate`, and an epoch has so many `steps`; by default 1/len(loader) and
        len(loader). `rank` and `world_size` count
        data-parallel ranks. A Poisson batch without samples has zero length in the shape that the
        collate function makes, or with `rand_on_empty` one sample of random zeros and ones; tensors
        have their batch in dimension 1 with `batch_first=False`. `drop_last` means nothing
        here. With `units` these are sampled (`PoissonSampler`), by `scheme`.
        Raises ValueError, with what to use in its place, for loaders whose data cannot be
        sampled by index and samplers that do not visit every sample alike.
        """
        _check_loader(loader, world_size)
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
        return cls(
            loader.dataset,
            sampler=sampler,
            collate_fn=loader.collate_fn,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            **kept_options(loader),
        )

    @property
    def sample_rate(self) -> float:
        return self.batch_sampler.sample_rate

    @property
    def position(self) -> int:
        return self.batch_sampler.position

    @position.setter
    def position(self, batches: int) -> None:
        self.batch_sampler.position = batches

    @property
    def on_batch(self) -> Callable[[int], object] | None:
        return self.batch_sampler.on_batch

    @on_batch.setter
    def on_batch(self, call: Callable[[int], object] | None) -> None:
        self.batch_sampler.on_batch = call

    @property
    def holds_dummy(self) -> bool:
        """Returns whether the last batch is the made-up sample of `rand_on_empty`."""
        return self.usage.ticket.is_dummy

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
        if not self.is_last(epoch):
            raise RuntimeError(OVER)

    def is_last(self, epoch: range | None) -> bool:
        """Returns whether no other iteration was begun since `start_epoch` returned `epoch`."""
        return epoch is self._epoch

    def coming_epoch(self) -> range:
        """Returns the batch numbers of the next iteration: the rest of a loaded epoch, or one.

        A batch that was left before a step has used it comes again (`SampleUsage.pending`). A loop
        could otherwise choose among batches, as by their size, and ε does not cover a choice.
        """
        usage, epoch = self.usage, self._epoch
        if self.batch_sampler.scheme.in_order:
            position = usage.unused_from
        elif usage.pending is not None:
            position = usage.pending
        else:
            position = max(self.position, usage.unused_from)
        if epoch is not None and position == epoch.start:
            return epoch  # nothing of it was used
        is_rest = self._resuming and position < self._epoch_end
        return range(position, self._epoch_end if is_rest else position + len(self))

    def start_epoch(self) -> range:
        """Begins an iteration where the user is, whatever was prefetched; returns its batches."""
        before, epoch = self._epoch, self.coming_epoch()
        is_again = before is not None and before.start == epoch.start == self.usage.pending
        is_again = is_again and (self.usage.is_firm or len(self) > 1)
        self._in_vain = self._in_vain + 1 if is_again else 0
        if self._in_vain == IN_VAIN:
            self._in_vain = 0
            raise RuntimeError(AGAIN.format(number=epoch.start, times=IN_VAIN))
        # Another object also if it is equal: it tells this iteration from others.
        epoch = range(epoch.start, epoch.stop)
        self._epoch = epoch
        self.position = epoch.start
        self._epoch_end, self._resuming = epoch.stop, False
        self.batch_sampler.seek(epoch)
        self.usage.begin_iteration()
        if self._owns_generator:
            self.generator.manual_seed(self.batch_sampler.seed(epoch.start))
        return epoch

    def hand_over(
        self, number: int, drawn: Drawn, batch: Any, alone: Any, *, first: bool = True,
        last: bool = True, rows: int | None = None, largest: int | None = None,
    ) -> None:  # fmt: skip
        """Announces batch `number`, or its `first` or `last` microbatch, before it is yielded.

        Args:
            drawn: its samples; without any it is a made-up one, if `rand_on_empty`.
            batch: what is yielded.
            alone: samples of it that were collated alone; None: there are none.
            rows, largest: as of `Ticket`.
        """
        if first and self.on_batch is not None:
            self.on_batch(number)
        if first and self.is_training is not None:
            is_first = self._epoch is not None and number == self._epoch.start
            # Where batches are in order, a step on a later one is refused in any case.
            is_first = is_first or self.batch_sampler.scheme.in_order
            self.usage.expect(number, in_training=self.is_training(), first=is_first)
        if not first and not self.usage.is_unused:
            raise RuntimeError(
                f"a step has used a part of Poisson batch {number} and would be followed by one on "
                "the rest: call optimizer.step() once after each microbatch, it skips all but the "
                "last"
            )
        self.usage.hand_over(Ticket(
            drawn.rows, number, rows, drawn.fill, self.rand_on_empty and not drawn.rows, largest,
            None if alone is None else (batch, alone),
        ))  # fmt: skip
        if last:
            self.position = number + 1

    def state_dict(self) -> dict[str, int | float]:
        """Returns the position in the data: without the key, and the same on every rank.

        A batch that was yielded for a step, and that none has used, comes again after a load.
        """
        return {
            "position": self.position if self.usage.pending is None else self.usage.pending,
            "epoch_end": self._epoch_end,
            "num_samples": self.batch_sampler.num_samples,
            "sample_rate": self.sample_rate,
        }

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Continues after the last batch that was yielded, with the rest of that epoch.

        With the same key the same batches follow. Raises ValueError for the state of other data or
        another rate.
        """
        for name in ("num_samples", "sample_rate"):
            here = getattr(self.batch_sampler, name)
            if state[name] != here:
                raise ValueError(
                    f"{name} is {state[name]} in the saved state and {here} in this data_loader: "
                    "resume with the data set and batch size of the saved run"
                )
        self.position = state["position"]
        self.usage.restart(self.position)
        self._epoch_end = state["epoch_end"]
        self._resuming = self.position < self._epoch_end
        self._epoch = None
        self.batch_sampler.seek(self.coming_epoch())


def kept_options(loader: DataLoader) -> dict[str, Any]:
    """Returns the arguments that a loader which replaces the user's keeps.

    `in_order` is not among them: a batch is told from the order in which it arrives.
    """
    names = (
        "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator "
        "prefetch_factor persistent_workers"
    )
    return {name: getattr(loader, name) for name in names.split()}


def _why_not_alone(num_workers: int, rand_on_empty: bool, sampler: PoissonSampler) -> str | None:
    """Returns why another loader may not take this one's batches; None: it may."""
    if num_workers:
        instead = "num_workers=0"
        what = f"with num_workers={num_workers} steps would take the end of one batch for another's"
    elif rand_on_empty:
        instead = "rand_on_empty=False"
        what = "what rand_on_empty=True makes up for an empty batch would be trained on"
    elif sampler.scheme.in_order:
        instead = 'sampling="poisson"'
        what = "its account needs each batch in one step, in order"
    elif sampler.rows_per_unit > 1:
        instead = "examples_per_unit=1 and views=1"
        what = "it would split units of examples_per_unit, and train on what fills them up"
        if sampler.units.size == 1:
            instead, what = "views=1", "it would split the views of a sample"
    else:
        return None
    return (
        f"another loader takes this one's batches (Opacus's BatchMemoryManager?), and {what}: use "
        f"dp_clipping.BatchMemoryManager, or {instead}"
    )


def batch_size_of(loader: DataLoader) -> int | None:
    """Returns the samples in a batch of the loader; None: its batch sampler does not say."""
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return size if is_count(size) else None


def expected_batch_size_of(
    loader: DataLoader, world_size: int, examples_per_unit: int = 1
) -> float:
    """Returns the units of a batch of the loader, times the ranks if each has its own data."""
    batch_size = batch_size_of(loader)
    if batch_size is None:
        raise ValueError("the loader has no batch_size: give expected_batch_size=")
    units = _units_in(batch_size, examples_per_unit)
    return float(units * (world_size if _distributed_sampler_of(loader) else 1))


def batches_of(loader: DataLoader, units: int, examples_per_unit: int) -> int:
    """Returns the number of batches per epoch of `units` units."""
    batch_size = batch_size_of(loader)
    if batch_size is None:
        raise ValueError(
            "the loader has no batch_size, from which the sample rate of units would follow: give "
            "sample_rate=, the probability of each unit to be in a batch"
        )
    sampler = _distributed_sampler_of(loader)
    each = -(-units // (1 if sampler is None else sampler.num_replicas))
    full, rest = divmod(each, _units_in(batch_size, examples_per_unit))
    return max(1, full + bool(rest and not loader.drop_last))


def _units_in(batch_size: int, examples_per_unit: int) -> int:
    units, rest = divmod(batch_size, examples_per_unit)
    if rest:
        least = units * examples_per_unit
        fits = f"{least} or {least + examples_per_unit}" if least else examples_per_unit
        raise ValueError(
            f"data_loader has batch_size {batch_size}, and a batch holds {examples_per_unit} rows "
            f"of each unit: give it batch_size {fits}"
        )
    return units


def _distributed_sampler_of(loader: DataLoader) -> DistributedSampler | None:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return sampler if isinstance(sampler, DistributedSampler) else None


def _check_loader(loader: DataLoader, world_size: int) -> None:
    if isinstance(loader, PoissonLoader):
        raise ValueError("data_loader does Poisson sampling already: give the one it was made from")
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"data_loader's {type(dataset).__name__} cannot be sampled by index: take its samples "
            "into a list, DataLoader(list(dataset), batch_size=64), or give a dataset with "
            "__getitem__ and __len__, or poisson_sampling=False"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "data_loader has batch_size=None: give a batch size: it sets the sample rate"
        )
    if len(loader) == 0:
        raise ValueError(
            f"data_loader has no batches of its {len(dataset)} samples: give more data, a "
            "smaller batch_size or drop_last=False"
        )
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if not _visits_all(sampler, loader, world_size):
        raise ValueError(
            f"data_loader's {type(sampler).__name__} does not visit each of the {len(dataset)} "
            "samples alike, once an epoch, as Poisson sampling does: for a part of the data give "
            "torch.utils.data.Subset(dataset, indices) and no sampler, for all of it shuffle=True"
        )


def _visits_all(sampler: Any, loader: DataLoader, world_size: int) -> bool:
    """Returns whether an epoch of all data-parallel ranks has each index exactly once.

    Told from what torch's own samplers are. Any other is asked for an epoch, whose order nothing
    uses; it may leave out less than a batch with `drop_last`.
    """
    size = len(loader.dataset)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != world_size:
            raise ValueError(
                f"data_loader's DistributedSampler has num_replicas {sampler.num_replicas}, and "
                f"there are {world_size} data-parallel ranks: give num_replicas={world_size}"
            )
        rounded = math.floor if sampler.drop_last else math.ceil
        return len(sampler.dataset) == size and len(sampler) == rounded(size / world_size)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        return False
    if type(sampler) in (SequentialSampler, RandomSampler):
        return len(sampler) == len(sampler.data_source) == size
    with torch.random.fork_rng(devices=[]):
        visited = list(islice(sampler, len(sampler)))
    spare = 0
    if sampler is loader.batch_sampler:
        spare = (batch_size_of(loader) or 1) - 1 if getattr(sampler, "drop_last", False) else 0
        visited = [index for batch in visited for index in batch]
    found = {int(index) for index in visited}
    return len(found) == len(visited) >= size - spare and found <= set(range(size))
