"""Reduces clipped sums of a sharded model to their shards.

FSDP2 itself reduces nothing here: a captured layer gives its parameters no gradient, so no mode
accumulates or reduce-scatters one in a norm pass. When a clipped sum is final, our own collective
sums it over the data axis into its shards, one FSDP module after the other, in float32 whatever the
mixed-precision policy is, while the next sums are computed (Rajbhandari et al. 2020,
arXiv:1910.02054, for sharding; Zhao et al. 2023, arXiv:2304.11277, for FSDP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.distributed.dtensor import local, size_of
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.distributed.torch_compat import all_reduce_together, reduce_scatter_together
from dp_clipping.profiling.profile import NOTHING, Profile, Timer
from dp_clipping.torch_compat import version_of, without_memory

IN_FLIGHT = 2  # units whose sums may be on the wire while the next are formed
REMEDY = (
    "between backward() and optimizer.step(), and the noise is scaled to the sum as it was: to "
    "clip or scale it, call optimizer.pre_step() first, then clip_grad_norm_(..) and "
    "optimizer.step(); if it was zeroed, or an ordinary backward has added to it, call "
    "optimizer.zero_grad() to drop the step"
)


class AwaitedSum(Tensor):
    """A tensor without memory, for a sum that the step puts into `.grad` when all ranks have it.

    What adds to it, as an ordinary backward does in the midst of FSDP2's collectives, only raises
    its version: the step refuses that.
    """

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        if function is torch.ops.aten.add_.Tensor and isinstance(args[0], cls):
            return args[0]
        raise RuntimeError(
            "the gradient of a sharded parameter was used, and is not there before the step; it "
            f"would be changed {REMEDY}"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "AwaitedSum(there after optimizer.pre_step() or optimizer.step())"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise RuntimeError("a sum that is not there cannot be saved: call optimizer.step() first")


def awaited_sum(parameter: Tensor, like: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns one for a parameter's gradient; `like` gives a part the parameter's layout."""
    part, dtype = local(parameter.detach()), parameter.grad_dtype or parameter.dtype
    like(parameter, part.new_empty((), dtype=dtype).expand(part.shape))  # finds the layout
    return like(parameter, without_memory(AwaitedSum, part, dtype))


class Departures:
    """Tells a wrapper of sums, in a backward only where all ranks are at the same place.

    A wrapper that gathers parameters in backward reduces between its gathers. A rank forms sums
    when it is short of memory, so what it is told must not depend on that.

    Attributes:
        deferred: sums wait until `launch_ready` is called.
        send: is called with each parameter whose sum is in `.grad`.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.send: Callable[[Parameter], None] = lambda parameter: None
        self._ready: list[Parameter] = []

    def ready(self, parameter: Parameter) -> None:
        self._ready.append(parameter)
        if not self.deferred:
            self.launch_ready()

    def launch_ready(self) -> None:
        """Sends what waits; every rank calls it at the same place among other collectives."""
        ready, self._ready = self._ready, []
        for parameter in ready:
            self.send(parameter)

    def forget(self) -> None:
        """Drops the sums of a step that failed."""
        self._ready = []


class ShardedSums:
    """Reduces clipped sums of whole parameters to this rank's shards, in `.grad`.

    All ranks issue the same collectives in the same order, whatever order sums come in: units
    from the last to the first, each when all of its sums are there. Large sums that divide evenly
    go as they are, the others of a unit packed into one.

    A private step calls `accumulate` for each final sum, and `launch_ready` where all ranks are at
    the same place if `deferred`; `GradientBuffer` calls `stand_in` after a backward, `finish`
    before noise is added and `forget` where a step is dropped.

    Attributes:
        deferred: sums are stored until `launch_ready` is called.
    """

    def __init__(self, sharding: Sharding, profile: Profile | None = None):
        self.sharding, self._timer = sharding, Timer(profile)
        self.deferred = False
        self._order = sorted(sharding.units, reverse=True)
        self._arrived: dict[int, dict[Parameter, Tensor]] = {}
        self._next = 0
        self._pending: list[list[Transfer]] = []
        self._written: dict[Parameter, tuple[Tensor, tuple[int, int]]] = {}  # `.grad`, its versions
        self._awaited: dict[Parameter, Tensor] = {}  # what stands there before
        # Not in `.grad` before all are there: what changes a DTensor's parts (the foreach functions
        # of clip_grad_norm_) moves no version, and FSDP1 resets `.grad` in each forward.
        self._sums: dict[Parameter, Tensor] = {}

    def forget(self) -> None:
        """Drops the sums of a step that failed."""
        for transfers in self._pending:
            for transfer in transfers:
                transfer.wait()
        self._arrived, self._next, self._pending = {}, 0, []
        self._written.clear()
        self._sums.clear()
        self.deferred = False

    @torch.no_grad()
    def changed(self) -> list[Parameter]:
        """Returns parameters whose `.grad` is not as `stand_in` or `finish` has written it."""
        found = []
        for parameter in self.sharding.parts:
            gradient, written = parameter.grad, self._written.get(parameter)
            is_same = gradient is None if written is None else gradient is written[0]
            if not is_same or (written is not None and _versions(gradient) != written[1]):
                found.append(parameter)
        return found

    @torch.no_grad()
    def stand_in(self) -> None:
        """Puts a tensor that raises when used into `.grad`, until the sum comes (`awaited`)."""
        for parameter in self.sharding.parts if self.sharding.leaves_gradients else ():
            if parameter.grad is None:
                if parameter not in self._awaited:
                    self._awaited[parameter] = awaited_sum(parameter, self.sharding.like)
                parameter.grad = awaited = self._awaited[parameter]
                self._written[parameter] = awaited, _versions(awaited)

    def settle(self) -> None:
        """Allows changes of `.grad`: noise has been added."""
        self._written.clear()

    def accumulate(self, parameter: Parameter, total: Tensor) -> None:
        """Takes the clipped sum of this rank's samples, in the shape that layers compute with."""
        unit = self.sharding.parts[parameter].unit
        self._arrived.setdefault(unit, {})[parameter] = total
        if not self.deferred:
            self.launch_ready()

    def launch_ready(self) -> None:
        """Launches the units whose sums are complete; every rank calls it at the same place among
        other collectives."""
        for unit in self._order[self._next :]:
            if len(self._arrived.get(unit, ())) < len(self.sharding.units[unit]):
                break
            self._next += 1
            with self._range():
                self._launch(self.sharding.units[unit], self._arrived.pop(unit))
                if len(self._pending) > IN_FLIGHT:
                    self._complete(self._pending.pop(0))
        if self._next == len(self._order):  # the next microbatch begins anew
            self._next = 0

    @torch.no_grad()
    def finish(self) -> None:
        """Puts all sums of the step into `.grad`, for later work of the current stream.

        Raises:
            RuntimeError: some parameters have no sum, as after an error half-way.
        """
        while self._pending:
            with self._range():
                self._complete(self._pending.pop(0))
        if self._next or self._arrived:
            raise RuntimeError("sums of some parameters have not arrived: was a backward cut off?")
        for parameter, total in self._sums.items():
            if parameter.grad is not None and parameter.grad is not self._awaited.get(parameter):
                local(parameter.grad).add_(total.view(local(parameter).shape))
            else:
                parameter.grad = self.sharding.like(parameter, total.view(local(parameter).shape))
        for parameter in self._sums:  # packed ones share a version: when all are done
            self._written[parameter] = parameter.grad, _versions(parameter.grad)
        self._sums.clear()

    def _range(self) -> AbstractContextManager:
        """Returns the range of a trace for what crosses ranks; nothing where nothing does."""
        is_shared = size_of(self.sharding.shards) > 1
        return self._timer.phase("reduce_scatter") if is_shared else NOTHING

    def _launch(self, parameters: list[Parameter], totals: dict[Parameter, Tensor]) -> None:
        """Starts one collective for all sums of a unit that have one dtype and layout."""
        transfers: list[Transfer] = []
        alike: dict[tuple[torch.dtype, bool], dict[Parameter, Tensor]] = {}
        for parameter in reversed(parameters):
            total = totals[parameter].contiguous()
            is_cut = parameter in self.sharding.slices
            is_cut |= self.sharding.parts[parameter].dim is not None
            alike.setdefault((total.dtype, is_cut), {})[parameter] = total
        for (_, is_cut), group in alike.items():
            if size_of(self.sharding.shards) == 1:
                transfers.append(Transfer(None, list(group.items())))
            elif is_cut:
                transfers.append(self._scatter(group))
            else:
                work = all_reduce_together(list(group.values()), self.sharding.shards)
                transfers.append(Transfer(work, list(group.items())))
        totals.clear()
        self._pending.append(transfers)

    def _scatter(self, totals: dict[Parameter, Tensor]) -> Transfer:
        """Starts the reduce-scatter of sums: even ones as they are, the others packed into one."""
        world, uneven = size_of(self.sharding.shards), {}
        shards, sent, received = [], [], []
        for parameter, total in totals.items():
            is_sliced = parameter in self.sharding.slices
            is_sliced |= bool(self.sharding.parts[parameter].dim) or not total.numel()
            if is_sliced or total.shape[0] % world:
                uneven[parameter] = self._pieces(parameter, total)
            else:
                shard = total.new_empty(total.shape[0] // world, *total.shape[1:])
                shards.append((parameter, shard))
                sent.append(total)
                received.append(shard)
        if uneven:
            rows, row, pieces = self._pack(uneven)
            shards += pieces
            sent.append(rows.view(-1))
            received.append(row)
        work = reduce_scatter_together(received, sent, self.sharding.shards)
        return Transfer(work, shards, sent)

    def _pieces(self, parameter: Parameter, total: Tensor) -> list[Tensor]:
        """Returns what each rank keeps of a sum, flattened; chunks of no rows are empty."""
        if parameter in self.sharding.slices:
            flat = total.reshape(-1)
            return [flat[start : start + n] for start, n in self.sharding.slices[parameter]]
        chunks = total.chunk(size_of(self.sharding.shards), self.sharding.parts[parameter].dim)
        missing = size_of(self.sharding.shards) - len(chunks)
        return [chunk.reshape(-1) for chunk in chunks] + [total.new_empty(0)] * missing

    def _pack(
        self, pieces: dict[Parameter, list[Tensor]]
    ) -> tuple[Tensor, Tensor, list[tuple[Parameter, Tensor]]]:
        """Arranges pieces side by side, padded, for a reduce-scatter.

        Returns rows [ranks, n], of which row r goes to rank r; the row [n] that this rank receives;
        and that row's part of each parameter.
        """
        of_rank = list(zip(*pieces.values(), strict=True))
        width = max(sum(map(len, of_one)) for of_one in of_rank)
        rows = of_rank[0][0].new_zeros(len(of_rank), width)
        for row, of_one in zip(rows, of_rank, strict=True):
            first = 0
            for piece in of_one:
                row[first : first + len(piece)] = piece
                first += len(piece)
        received = torch.empty_like(rows[0])
        lengths = list(map(len, of_rank[dist.get_rank(self.sharding.shards)]))
        own = received[: sum(lengths)].split(lengths)
        return rows, received, list(zip(pieces, own, strict=True))

    @torch.no_grad()
    def _complete(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            transfer.wait()
            transfer.sent.clear()
            replicas, shards = self.sharding.replicas, [x for _, x in transfer.shards if x.numel()]
            if replicas is not None and shards:
                all_reduce_together(shards, replicas).wait()
            for parameter, shard in transfer.shards:
                if parameter in self._sums:
                    self._sums[parameter].add_(shard.view_as(self._sums[parameter]))
                else:
                    self._sums[parameter] = shard


@dataclass
class Transfer:
    """A collective in progress: its buffers, and the parameters that they are for.

    Without `work` it is done.
    """

    work: Any
    shards: list[tuple[Parameter, Tensor]]
    sent: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Returns the version of a DTensor, which counts changes made through it, and of its part."""
    return version_of(gradient), version_of(local(gradient))
