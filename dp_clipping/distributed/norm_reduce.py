"""Sums per-sample squared norms over ranks: for clipping, and for a view of the global batch.

One quantity is right everywhere: a vector with a slot for each sample of the global batch (for each
of K clipping groups: [K, G]), to which a rank adds ‖g_ik‖² of each pair (sample i, parameter
shard k) that it owns, every pair owned once. A mesh has two kinds of axes:

| axis | its members hold | a SUM over it gives |
| --- | --- | --- |
| tensor | the same samples, other shards of the parameters | ‖g_i‖² = Σ_k ‖g_ik‖²: what clips |
| data | other samples, in other slots | all slots on every rank: what statistics read |

Slot by slot over the tensor axis is exact. Slot by slot over a *data* axis is a privacy bug: each
norm would look conservatively large, and yet removing one huge sample would un-clip the W - 1
samples that shared its slot, so that the sum moves by up to C(1 + √(W - 1)) while the noise is
calibrated to C. So `reduce` and `layerwise` know the tensor axis only, and `gather` gives each data
rank slots of its own.

Norms for clipping are reduced in one of three ways (`NORM_REDUCTIONS`), equal up to the rounding of
additions:

    sync        one all-reduce that blocks
    async       one all-reduce beside independent work, until `wait()`
    layerwise   partial sums are reduced during backward, in one fixed order; `wait()` adds them up

All members of the tensor axis end up with the same bits, so they clip alike.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import cos, pi, sin
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

NORM_REDUCTIONS = ("sync", "async", "layerwise")
SAME_LOSS = 1e-3  # losses of one sample on two ranks are this close; those of two samples are not
DIFFERS = 1e-3  # relative; replicas of one norm differ by rounding, far less
SMALL = 1e-8  # of a sample's squared norm: so little may differ wholly, as where terms cancel
NONE = 1e-32  # squared norms that are nothing beside any C: float32 rounds the smallest coarsely
PARAMETERS_PER_PARTIAL_SUM = 16  # parameters to a partial sum: an 8B Llama, 291 of them, has 19


class NormReducer:
    """Sums squared norms over the axes of a mesh on which they add up.

    A model has one. A private step calls `reduce` once per backward, or `layerwise` at its
    beginning; `gather` is for statistics and adaptive thresholds.

    Collectives match by call order, so all members of an axis make the same calls in the same
    order, also where a batch is empty. World size 1 communicates nothing.

    Args:
        data_parallel_group: the axis whose members hold different samples.
        tensor_group: the axis whose members hold the same samples and parts of parameters. Its
            collectives are launched among the layers' own on this group: where the order of the
            two is not the same on all members, give a group of the same ranks to this alone.
        mode: one of `NORM_REDUCTIONS`, the same on every rank.
        device: where norms are.
        dtype: what norms are exchanged in: float64 for a model in float64.

    Raises:
        ValueError: for a 16-bit dtype, or axes that are not those of a mesh.
    """

    def __init__(
        self, *, data_parallel_group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None, mode: str = "sync",
        device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"norms are exchanged in float32 or float64, not in {dtype}")
        self.mode, self.device, self.dtype = mode, torch.device(device), dtype
        self.tensor = Axis("tensor-parallel", tensor_group)
        self.data = Axis("data", data_parallel_group)
        groups = [axis.group for axis in (self.tensor, self.data) if axis.size > 1]
        ranks = [rank for group in groups for rank in dist.get_process_group_ranks(group)]
        if len(ranks) - len(set(ranks)) > 1:
            raise ValueError(
                "the data and tensor-parallel axes have ranks in common: a rank with other samples "
                "and one with other shards of the parameters are different ranks, so give the "
                "groups of a mesh's axes"
            )
        self.splits_parameters = self.tensor.size > 1
        is_cuda = self.device.type == "cuda"
        self.side_stream = torch.cuda.Stream(self.device) if is_cuda else None

    def check_same_samples(self, losses: Tensor) -> None:
        """Raises RuntimeError on every member if losses [B] differ over the tensor axis; blocks.

        For the first steps: its members compute the same losses, and a loader that deals samples
        out to all ranks gives them others. Adding up norms of those is the bug described above.
        """
        here = self.exchanged(losses).nan_to_num()
        what = f"{len(here)} losses"
        both = torch.cat([here, -here])
        highest, lowest = self.tensor.sum(both, what, "sync", dist.ReduceOp.MAX).wait().chunk(2)
        apart, allowed = highest + lowest, SAME_LOSS * (highest.abs() + lowest.abs() + 1)
        if bool((apart > allowed).any()):
            raise RuntimeError(
                "ranks of one tensor-parallel axis have different losses for what should be the "
                "same samples: deal the data out over data ranks only (num_replicas and rank of a "
                "DistributedSampler are those of the data axis), with the same dropout on all"
            )

    def reduce(self, table: Tensor) -> "PendingReduce":
        """Launches the sum of tables [n, K, B] over the tensor axis, B the local batch.

        A table holds what adds up over shards: squared norms, and upper bounds of squared norms
        (a bound of a sum is the sum of bounds). The tensor given is not changed.
        """
        what = f"a table {list(table.shape)} of squared norms"
        return self.tensor.sum(self.exchanged(table), what, self.mode)

    def layerwise(self, order: Sequence[Hashable], table: Any, **every: int) -> "Layerwise":
        """Returns the partial sums of one backward: see `Layerwise`."""
        return Layerwise(self, order, table, **every)

    def gather(self, squares: Tensor) -> "PendingReduce":
        """Launches an exchange of squared norms [K, B] for those of the global batch, [K, G].

        All ranks get the same bits, of samples in the order of data ranks.

        Raises:
            RuntimeError: on every rank of a tensor axis whose ranks have different numbers of
                samples, or if a rank was lost.
        """
        sizes = self._batch_sizes(squares.shape[-1])
        before, rest = sum(sizes[: self.data.rank]), sum(sizes[self.data.rank + 1 :])
        # Each slot has one owner, and adding zeros rounds nothing.
        table = F.pad(self.exchanged(squares), (before, rest))
        what = f"squared norms of the global batch of {sum(sizes)}"
        return self.data.sum(table, what, "async")

    def _batch_sizes(self, size: int) -> list[int]:
        """Returns local batch sizes in order of data ranks, on every rank's host.

        On a GPU they travel on a stream of their own: reading them does not wait for the model.
        """
        sizes = [0] * self.data.size
        sizes[self.data.rank] = size
        with torch.cuda.stream(self.side_stream):  # None: the current one
            table = torch.tensor(sizes, device=self.device)
            table = self.data.sum(table, what := "the local batch sizes", "async").wait()
            both = torch.cat([table, -table])  # largest and smallest of the tensor axis
            found = self.tensor.sum(both, what, "async", dist.ReduceOp.MAX).wait().tolist()
        largest, smallest = found[: len(sizes)], [-size for size in found[len(sizes) :]]
        if largest != smallest:
            raise RuntimeError(
                "ranks of one tensor-parallel axis have different numbers of samples (largest by "
                f"data rank {largest}, smallest {smallest}): they must sample the same batches"
            )
        return largest

    def exchanged(self, table: Tensor) -> Tensor:
        """Returns a copy in the dtype of the exchange, which must not round."""
        if torch.promote_types(table.dtype, self.dtype) != self.dtype:
            raise ValueError(
                f"norms are {table.dtype} and would be rounded to {self.dtype}: build the reducer "
                "with their dtype"
            )
        copy = torch.empty(table.shape, device=self.device, dtype=self.dtype)
        return copy.copy_(table.detach())


class Axis:
    """The ranks along one axis of a mesh; without a group, this rank alone."""

    def __init__(self, name: str, group: dist.ProcessGroup | None):
        self.name, self.group = name, group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"this rank is no member of the group given as its {name} axis")

    def sum(self, table: Tensor, what: str, mode: str, operation: Any = None) -> "PendingReduce":
        """Launches an all-reduce in place, contiguous; nothing for one member or an empty table."""
        if self.size == 1 or not table.numel():
            return PendingReduce(table)
        operation = dist.ReduceOp.SUM if operation is None else operation
        description = f"{what} over the {self.name} axis ({self.size} ranks)"
        with _naming(description), record_function("norm_reduce/launch"):
            work = dist.all_reduce(table, operation, group=self.group, async_op=mode != "sync")
        return PendingReduce(table, work, description)


class PendingReduce:
    """A table that is being summed, or is summed already."""

    def __init__(self, table: Tensor, work: dist.Work | None = None, description: str = ""):
        self._table, self._work, self._description = table, work, description

    def wait(self) -> Tensor:
        """Returns the sum; may be called again.

        Raises:
            RuntimeError: if a rank was lost, on all others within the group's timeout.
        """
        if self._work is not None:
            with _naming(self._description), record_function("norm_reduce/wait"):
                self._work.wait()
            self._work = None
        return self._table


class Layerwise:
    """Sums over the tensor axis that are launched while backward is still running.

    Keys (parameters, say) are cut into chunks of `every` in the given order. A chunk is launched
    once all of its keys were added and all chunks before it are launched, so every rank launches
    the same collectives in the same order. Chunks with a key that is never added (a parameter that
    this backward did not reach) are launched by `wait`.

    Launches mix with what backward itself sends over the axis, so `add` is called at places in
    backward that are the same on all ranks, not by how much memory is free.

    Args:
        order: all keys, the same on every rank; best in the order in which they arrive.
        table: the keys of a chunk that have arrived -> their part [n, K, B] of the whole table,
            zeros for none.
        every: keys to a chunk.
    """

    def __init__(
        self, reducer: NormReducer, order: Sequence[Hashable],
        table: Callable[[Sequence[Hashable]], Tensor], every: int = PARAMETERS_PER_PARTIAL_SUM,
    ):  # fmt: skip
        if every < 1:
            raise ValueError(f"every is {every}: give at least 1 key to a chunk")
        self._reducer, self._table_of = reducer, table
        self._chunks = [order[i : i + every] for i in range(0, len(order), every)] or [()]
        self._chunk_of = {key: number for number, keys in enumerate(self._chunks) for key in keys}
        assert len(self._chunk_of) == len(order), "a key is in one chunk, once"
        self._missing = [len(keys) for keys in self._chunks]
        self._arrived: set[Hashable] = set()
        self._pending: list[PendingReduce] = []

    @property
    def launched(self) -> int:
        """Returns the number of chunks that are launched."""
        return len(self._pending)

    def add(self, key: Hashable) -> None:
        """Marks a key's norms as final, and launches the chunks that this completes."""
        assert key not in self._arrived, f"{key} has arrived twice in one backward"
        chunk = self._chunk_of[key]
        assert chunk >= self.launched, f"{key} arrives after its chunk was launched"
        self._arrived.add(key)
        self._missing[chunk] -= 1
        while self.launched < len(self._chunks) and not self._missing[self.launched]:
            self._launch()

    def wait(self) -> Tensor:
        """Returns the sum of all parts over all members [n, K, B]; later calls add nothing."""
        while self.launched < len(self._chunks):
            self._launch()
        return torch.stack([pending.wait() for pending in self._pending]).sum(0)

    def _launch(self) -> None:
        keys = [key for key in self._chunks[self.launched] if key in self._arrived]
        part = self._reducer.exchanged(self._table_of(keys))
        what = f"partial sum {self.launched + 1} of {len(self._chunks)} of squared norms"
        self._pending.append(self._reducer.tensor.sum(part, what, "layerwise"))


class SplitNorms:
    """Norms of one batch whose parameters are split: each rank has a part of every norm.

    Each rank writes a table of what adds up over ranks (`table`), the reducer adds the tables up,
    and `unpack` reads the sum. A parameter that all ranks have whole is counted by one of them. It
    also has to be the same everywhere: its per-sample gradient is then the same on each rank, and
    sums of its squared norms with weights that add up to zero vanish. They do not where a rank has
    computed with a part of its input (an RMSNorm over the heads that the rank has): there it holds
    a term of the gradient, and no norm of a sample is known.

    Args:
        sharding: how the network is spread over ranks, a `sharding.Sharding`; None: it is not.
    """

    def __init__(self, reducer: NormReducer, sharding: Any):
        self._reducer, self._sharding = reducer, sharding

    def table(self, norms: Any, parameters: Iterable[Any]) -> Tensor:
        """Returns this rank's table for some parameters, whose rows add up over ranks: [5, K, B].

        `norms`: the `clipping.norms.Norms` of the batch.

        Squared norms; upper bounds of the squared norms of what will be summed; squared norms of
        shared parameters, as they are and with two weights.
        """
        counts_shared = self._reducer.tensor.rank == 0  # one rank does, of those that have them
        every, whole = set(parameters), self._shared(parameters)
        counted = norms.only(every if counts_shared else every - whole)
        shared = norms.only(whole).squared()
        return torch.stack([counted.squared(), counted.bounds(), *self._weighted(shared)])

    def unpack(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Returns squared norms and upper bounds [K, B] from the sum of all tables [5, K, B]."""
        squares, bounds, shared, across, along = total
        differs = across.abs() + along.abs() > DIFFERS * shared + NONE
        return squares, torch.where(differs, torch.inf, bounds)

    def refuse_differences(self, norms: Any, parameters: Iterable[Any]) -> None:
        """Raises RuntimeError on every rank if a parameter that all have whole is not the same.

        In the sums of `table` a parameter with a small part of the norm hides behind the others.
        Here each has a sum of its own, which takes a collective that blocks.

        Args:
            norms: the `clipping.norms.Norms` of the batch.
            parameters: all trainable ones, the same on every rank.
        """
        whole = sorted(self._shared(parameters), key=lambda one: one.number)
        if not whole:
            return
        values, own = norms.of_each(whole)
        total, weighted = norms.squared().sum(0), torch.stack(self._weighted(values))
        table = self._reducer.exchanged(torch.cat([total, own, weighted.flatten()]))
        what = f"squared norms of {len(whole)} parameters that are not split"
        table = self._reducer.tensor.sum(table, what, "sync").wait()
        total, own, every = table.split([len(total), len(own), weighted.numel()])
        weighted = every.view_as(weighted)
        # What some ranks have taken together with others is compared together.
        apart = ((own > 0) & (own < self._reducer.tensor.size))[:, None]
        weighted[:, -1] += weighted.where(apart, 0).sum(1)
        shared, across, along = weighted.masked_fill(apart, 0)
        differs = across.abs() + along.abs() > DIFFERS * shared + SMALL * total + NONE
        found = differs.any(1).tolist()
        if any(found):
            names = [one.name for one, is_other in zip(whole, found, strict=False) if is_other]
            raise RuntimeError(
                f"{', '.join(names[:3]) or 'a parameter'}: not split over the tensor-parallel axis "
                "and with other per-sample gradients on each of its ranks, because the module is "
                "given a part of its input there (a norm over the heads that a rank has, say), so "
                "no rank knows the gradient; freeze it, or let the plan gather its input"
            )

    def _weighted(self, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns squared norms, and two multiples whose sums are 0 where ranks have the same."""
        angle = 2 * pi * self._reducer.tensor.rank / self._reducer.tensor.size
        return shared, cos(angle) * shared, sin(angle) * shared

    def _shared(self, parameters: Iterable[Any]) -> set[Any]:
        """Returns the parameters that all ranks of the tensor axis have whole."""
        if self._sharding is None:
            return set(parameters)
        parts = self._sharding.parts
        return {p for p in parameters if not parts[p.parameter].split}


def refuse_split_samples(layer: str, what: str, placements: Sequence[Any], shape: Sequence[int],
                         features: int = 1) -> None:  # fmt: skip
    """Raises ValueError if the tensor-parallel axis splits one sample's tokens, or the batch.

    Args:
        layer: its full name.
        what: which of its tensors, `"input"` or `"output"`.
        placements: on the tensor-parallel mesh.
        shape: of the whole tensor; of its dimensions the last `features` do not count tokens or
            samples (0 for token ids).
    """
    for placement in placements:
        dim = getattr(placement, "dim", None)  # Shard, and the strided one, which is no subclass
        if dim is None or dim % len(shape) >= len(shape) - features:
            continue
        raise ValueError(
            f"{layer}: its {what} {list(shape)} is sharded on dimension {dim} over the "
            "tensor-parallel axis, which splits tokens or samples (sequence or context parallel). "
            "Each rank would hold a partial sum of one sample's gradient, and ‖Σ_r g_r‖² is not "
            "Σ_r ‖g_r‖²: the cross terms would be missing in the norm. Use a plan that shards "
            "features only (no SequenceParallel, inputs and outputs replicated or Shard(-1))"
        )


@contextmanager
def _naming(description: str) -> Iterator[None]:
    """Adds what was exchanged to a process group's error."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"exchange of {description} failed: a rank was lost, came too late or exchanges "
            f"something else; its own error says why ({error})"
        ) from error
