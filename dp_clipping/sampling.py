"""Poisson sampling: in every step each sample takes part with probability q, independently.

That is what the accountants assume (Abadi et al. 2016, "Deep Learning with Differential Privacy";
Mironov, Talwar and Zhang 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism"), so
batches have random sizes and may be empty. Numbered from 0 over all epochs, a *draw* is the batch
of one step on all data-parallel ranks together. Which samples it holds is a pure function of a
secret key and its number: ranks need not communicate, workers may prefetch, a resume has only a
number to restore, and no seed of the user's has any influence.

Whoever holds the key knows the draws. Philox (Salmon et al. 2011, "Parallel Random Numbers: As
Easy as 1, 2, 3") is counter-based and not cryptographic.
"""

import copy
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from dp_clipping.budget import Budget

KEY_BYTES = 32


def included(key: bytes, step: int, num_samples: int, sample_rate: float) -> Tensor:
    """Which samples are in draw `step`: bool [num_samples].

    Entry i is a function of (key, step, i) and the rate alone. The probability is `sample_rate`
    rounded down to a multiple of 2⁻⁶⁴, so never above what the accountant was told. Raises
    ValueError for a key of other than 32 bytes, a negative step, fewer than one sample and a rate
    outside (0, 1].
    """
    _check_draw(key, step, num_samples, sample_rate)
    # Noise is keyed by the same kind of secret: the personalisation keeps the streams apart.
    derived = hashlib.blake2b(key=key, person=b"sampling", digest_size=16).digest()
    # The step is in the counter's second word and blocks of samples count in its first.
    generator = np.random.Philox(key=int.from_bytes(derived, "little"), counter=step << 64)
    return torch.from_numpy(generator.random_raw(num_samples) < int(sample_rate * 2**64))


class PoissonSampler(Sampler[list[int]]):
    """A batch sampler: each iteration gives the next `steps` draws, as one rank sees them.

    Rank r of the `world_size` data-parallel ranks has the samples i with i % world_size == r, so
    ranks are disjoint and together make the draw of a single process. Ranks that share samples (one
    tensor-parallel group) pass the same rank. `num_samples` counts the whole data set.

    `step` is the number of the next draw and runs on from epoch to epoch. A prefetching DataLoader
    moves it ahead of what the user has seen: see `PoissonLoader.position` for what a resume needs.
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
    ) -> None:
        _check_draw(key, 0, num_samples, sample_rate)
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
        self.step = 0
        self.budget = Budget()
        self.sizes: deque[int] | None = None  # of this rank's batches; the loader's, if it asks
        self._key = key
        self._next_steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        sizes, self.sizes = self.sizes, None
        if sizes is None:
            self.budget.forget()
        for shares in self.draws():
            if sizes is not None:
                sizes.append(len(shares[self.rank]))
            yield shares[self.rank]

    def draws(self) -> Iterator[list[list[int]]]:
        """The next `steps` draws, each as `shares` gives it."""
        steps, self._next_steps = self._next_steps, self.steps
        for _ in range(steps):
            self.step += 1
            yield self.shares(self.step - 1)

    def shares(self, step: int) -> list[list[int]]:
        """Draw `step` as one ascending list of indices for each rank."""
        mask = included(self._key, step, self.num_samples, self.sample_rate)
        indices = mask.nonzero().flatten()
        return [indices[indices % self.world_size == r].tolist() for r in range(self.world_size)]

    def rekey(self, key: bytes) -> None:
        """Take the coming draws from another key, as a resumed run does."""
        _check_draw(key, 0, self.num_samples, self.sample_rate)
        self._key = key

    def seek(self, draws: range) -> None:
        """Let the next iteration give these draws, and the ones after it continue from there."""
        self.step = draws.start
        self._next_steps = len(draws)


class PoissonLoader(DataLoader):
    """A DataLoader whose batches are draws; made by `from_data_loader`.

    Attributes:
        sample_rate: q.
        position: how many draws the user has been handed, over all epochs.
        on_draw: called with a draw's number just before its (first) batch is handed to the user,
            in the main process; what it raises reaches the user instead of the batch.
        budget: how many samples are in the user's hands.
        holds_dummy: the batch in the user's hands is the made-up sample of `rand_on_empty`. Its
            gradient must be masked: were it added, taking away the only real sample of a draw
            could move the sum by 2C.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        sampler: PoissonSampler,
        collate_fn: Callable[[list], Any],
        original_batch_size: int | None,
        distributed: bool,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        **options,
    ) -> None:
        # Worker seeds would otherwise be taken from torch's global stream at each start of an
        # iteration, which a resumed run starts once more than one that was not interrupted.
        self._owns_generator = options.get("generator") is None
        if self._owns_generator:
            options["generator"] = torch.Generator()
        collate = CollateWithEmpty(
            collate_fn, dataset[0], batch_dim=0 if batch_first else 1, dummy=rand_on_empty
        )
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        self.rand_on_empty = rand_on_empty
        self.position = 0
        self.on_draw: Callable[[int], object] | None = None
        self.holds_dummy = False
        self._original_batch_size = original_batch_size
        self._distributed = distributed
        self._epoch_end = 0
        self._resuming = False

    @classmethod
    def from_data_loader(
        cls,
        loader: DataLoader,
        *,
        key: bytes,
        rank: int = 0,
        world_size: int = 1,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> Self:
        """The user's loader with its order of samples replaced by draws; the rest is kept.

        q = 1/len(loader), and an epoch has len(loader) steps. `rank` and `world_size` count
        data-parallel ranks. A draw without samples becomes a batch of zero length in the shape that
        the collate function makes, or with `rand_on_empty` one sample of random zeros and ones;
        tensors have their batch in dimension 1 with `batch_first=False`. `drop_last` means nothing
        here. Raises ValueError, with what to use in its place, for loaders whose data cannot be
        drawn by index and samplers that do not visit every sample alike.
        """
        _check_loader(loader, world_size)
        sampler = PoissonSampler(
            num_samples=len(loader.dataset),
            sample_rate=1 / len(loader),
            steps=len(loader),
            key=key,
            rank=rank,
            world_size=world_size,
        )
        return cls(
            loader.dataset,
            sampler=sampler,
            collate_fn=loader.collate_fn,
            original_batch_size=getattr(loader.batch_sampler, "batch_size", None),
            distributed=isinstance(_index_sampler(loader), DistributedSampler),
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            **kept_options(loader),
        )

    @property
    def sample_rate(self) -> float:
        return self.batch_sampler.sample_rate

    @property
    def budget(self) -> Budget:
        return self.batch_sampler.budget

    def expected_batch_size(self, world_size: int) -> int:
        """Samples of a draw on all ranks together, as the user's loader states them.

        A public constant, and not the number that was drawn: its `batch_size`, times the ranks if
        it had a DistributedSampler. Raises ValueError where a batch sampler does not tell.
        """
        if self._original_batch_size is None:
            raise ValueError(
                "data_loader has a batch_sampler without batch_size, so the expected batch is not "
                "known: give expected_batch_size"
            )
        return self._original_batch_size * (world_size if self._distributed else 1)

    def __iter__(self) -> Iterator[Any]:
        first = self.start_epoch().start
        # Of this iteration alone: one that was left early cannot disturb it.
        sizes = self.batch_sampler.sizes = deque()
        for draw, batch in enumerate(super().__iter__(), first):
            self.hand_over(draw, sizes.popleft())
            yield batch

    def coming_epoch(self) -> range:
        """The draws that the next iteration gives: what a loaded state left over, or an epoch."""
        end = self._epoch_end if self._resuming else self.position + len(self)
        return range(self.position, end)

    def start_epoch(self) -> range:
        """Let the batch sampler begin where the user is, whatever was prefetched beyond."""
        epoch = self.coming_epoch()
        self._epoch_end, self._resuming = epoch.stop, False
        self.batch_sampler.seek(epoch)
        self.budget.begin_iteration()
        if self._owns_generator:
            self.generator.manual_seed((torch.initial_seed() + epoch.start) % 2**63)
        return epoch

    def hand_over(self, draw: int, samples: int, *, first: bool = True, last: bool = True) -> None:
        """Called before a batch is yielded, which may be only the `first` or `last` of its draw.

        Without `samples` it is a made-up one, if `rand_on_empty`.
        """
        if draw != self.position:
            raise RuntimeError(
                f"this iteration is at draw {draw} and data_loader at draw {self.position}: "
                "another iteration or load_state_dict has moved it, use one at a time"
            )
        if first and self.on_draw is not None:
            self.on_draw(draw)
        if not first and not self.budget.is_unused:
            raise RuntimeError(
                f"a step has used a part of draw {draw} and would be followed by one on the rest: "
                "call optimizer.step() once after each microbatch, it skips all but the last"
            )
        self.budget.hand_over(samples)
        self.holds_dummy = self.rand_on_empty and samples == 0
        if last:
            self.position = draw + 1

    def state_dict(self) -> dict[str, int | float]:
        """Where the user is. Holds no key; the same on every rank, for any number of ranks."""
        return {
            "position": self.position,
            "epoch_end": self._epoch_end,
            "num_samples": self.batch_sampler.num_samples,
            "sample_rate": self.sample_rate,
        }

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Continue after the last batch that was handed out, with the rest of that epoch.

        With the same key the same draws follow. Raises ValueError for the state of other data or
        another rate.
        """
        for name in ("num_samples", "sample_rate"):
            mine = getattr(self.batch_sampler, name)
            if state[name] != mine:
                raise ValueError(
                    f"{name} is {state[name]} in the saved state and {mine} in this data_loader: "
                    "resume with the data set and batch size of the saved run"
                )
        self.position = state["position"]
        self._epoch_end = state["epoch_end"]
        self._resuming = self.position < self._epoch_end


class CollateWithEmpty:
    """A collate function that also knows what no samples look like: `empty`, made once.

    Two collated copies of `sample` beside one tell a list with an entry for every sample, which
    becomes empty, from one that is structure. With `dummy`, no samples become one sample whose
    tensors are random zeros and ones. Raises ValueError for what might carry the sample itself into
    an empty batch: anything but tensors, arrays, numbers, strings and None in mappings, lists and
    tuples. Numbers and strings that are not in a list of samples stay as they are.
    """

    def __init__(
        self, collate_fn: Callable[[list], Any], sample: Any, *, batch_dim: int, dummy: bool
    ) -> None:
        self.collate_fn = collate_fn
        self.batch_dim = batch_dim
        # Copies, because some collate functions change their samples.
        one = collate_fn([copy.deepcopy(sample)])
        two = collate_fn([copy.deepcopy(sample) for _ in range(2)])
        # A generator of its own: the user's streams stay as they are.
        self.empty = self._dummy(one, torch.Generator()) if dummy else self._empty(one, two)

    def __call__(self, samples: list) -> Any:
        # A copy, because users may change a batch.
        return self.collate_fn(samples) if len(samples) else copy.deepcopy(self.empty)

    def _empty(self, one: Any, two: Any) -> Any:
        if isinstance(one, Tensor | np.ndarray) and one.ndim > 0:
            dim = min(self.batch_dim, one.ndim - 1)  # labels have one dimension in any case
            shape = (*one.shape[:dim], 0, *one.shape[dim + 1 :])
            # New ones: a slice would keep the sample's storage.
            return one.new_empty(shape) if isinstance(one, Tensor) else np.empty(shape, one.dtype)
        if isinstance(one, list | tuple) and len(one) != len(two):
            return type(one)()
        return _map_entries(self._empty, one, two)

    def _dummy(self, one: Any, generator: torch.Generator) -> Any:
        if isinstance(one, Tensor):
            return torch.randint(2, one.shape, generator=generator).to(one)
        if isinstance(one, np.ndarray):
            return torch.randint(2, one.shape, generator=generator).numpy().astype(one.dtype)
        return _map_entries(lambda entry: self._dummy(entry, generator), one)


def kept_options(loader: DataLoader) -> dict[str, Any]:
    """What a loader that replaces the user's takes over besides the data.

    `in_order` is not among them: a batch is told from the order in which it arrives.
    """
    names = (
        "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator "
        "prefetch_factor persistent_workers"
    )
    return {name: getattr(loader, name) for name in names.split()}


def _map_entries(function: Callable[..., Any], one: Any, *others: Any) -> Any:
    """`one` with `function` applied to the entries of a container; a plain value as it is."""
    if isinstance(one, Mapping):
        entries = {key: function(one[key], *(other[key] for other in others)) for key in one}
        if not isinstance(one, MutableMapping):
            return type(one)(entries)
        result = copy.copy(one)  # keeps what else such a class holds, e.g. a BatchEncoding
        result.update(entries)
        return result
    if isinstance(one, list | tuple):
        entries = [function(*entry) for entry in zip(one, *others, strict=True)]
        return type(one)(*entries) if hasattr(one, "_fields") else type(one)(entries)
    if one is None or isinstance(one, int | float | complex | str | bytes | np.generic | Tensor):
        return one
    raise ValueError(
        f"collate_fn makes a {type(one).__name__}, and what no samples look like is not known of "
        "it: make tensors, arrays, numbers, strings or None, in dicts, lists or tuples"
    )


def _index_sampler(loader: DataLoader) -> Any:
    """What gives single indices, below the batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _check_draw(key: bytes, step: int, num_samples: int, sample_rate: float) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"key is not {KEY_BYTES} bytes: give secrets.token_bytes({KEY_BYTES})")
    if step < 0:
        raise ValueError(f"step is {step}: steps are counted from 0, give 0 or more")
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}: give 1 or more")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate is {sample_rate}: give a probability above 0, at most 1")


def _check_loader(loader: DataLoader, world_size: int) -> None:
    if isinstance(loader, PoissonLoader):
        raise ValueError("data_loader does Poisson sampling already: give the one it was made from")
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"data_loader's {type(dataset).__name__} cannot be drawn from by index: give a dataset "
            "with __getitem__ and __len__, or poisson_sampling=False"
        )
    if loader.batch_sampler is None:
        raise ValueError("data_loader has batch_size=None: give a batch size, samples are drawn")
    if len(loader) == 0:
        raise ValueError(
            f"data_loader has no batches of its {len(dataset)} samples: give more data, a "
            "smaller batch_size or drop_last=False"
        )
    sampler = _index_sampler(loader)
    visited = len(dataset)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != world_size:
            raise ValueError(
                f"data_loader's DistributedSampler has num_replicas {sampler.num_replicas}, and "
                f"there are {world_size} data-parallel ranks: give num_replicas={world_size}"
            )
        rounded = math.floor if sampler.drop_last else math.ceil
        visited = rounded(visited / world_size)
    if isinstance(sampler, WeightedRandomSampler) or len(sampler) != visited:
        raise ValueError(
            f"data_loader's {type(sampler).__name__} does not visit each of the "
            f"{len(dataset)} samples alike, as Poisson sampling does: for a part of the "
            "data give torch.utils.data.Subset(dataset, indices) and no sampler"
        )
