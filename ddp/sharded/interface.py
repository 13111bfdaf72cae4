"""Gives every sharded variant its methods for a training loop, in terms of its units.

They are the three of `ddp.internals.optimizer.Replicated`, and `gradient_pieces` for code that
works on gradients element by element.
"""

from collections.abc import Callable
from functools import reduce
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.internals.gradients import Gradients, Reduction
from ddp.internals.interface import trainable
from ddp.internals.step import Step
from ddp.sharded.layout import FlatUnit
from ddp.sharded.optimizer import ShardedOptimizer, refuse_not_reduced
from ddp.sharded.torch_compat import gather_on_hosts, gloo_beside
from ddp.torch_compat import reduce_scatter

STATUS_BYTES = 400  # of a message to other ranks

UNFINISHED = (
    "gradients are on their way to other ranks: call finish_gradient_synchronization() after "
    "backward()"
)


class Sharded:
    """Methods of a wrapper whose ranks each own one slice of every unit."""

    module: nn.Module
    process_group: dist.ProcessGroup
    units: list[FlatUnit]
    gradients: Gradients
    reduction: Reduction
    step: Step
    world_size: int
    is_copy: bool
    reductions: int = 0
    """Reduce-scatters that were started, which all ranks start alike."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)  # type: ignore[call-arg]  # of the variant
        if self.world_size > 1 and not self.is_copy:  # building a copy communicates nothing
            gloo_beside(self.process_group)

    def reduce_slices(self, own: Tensor, flat: Tensor) -> dist.Work:
        """Starts to reduce `flat` over ranks; `own` gets this rank's slice, see `average`."""
        self.reductions += 1
        op = self.reduction.op if self._can_average else dist.ReduceOp.SUM
        return reduce_scatter(own, flat, op, self.process_group)

    def average(self, own: Tensor | None) -> None:
        """Divides a reduced slice, where a mean is wanted and the backend can only add."""
        if own is not None and self.reduction.name == "mean" and not self._can_average:
            own.div_(dist.get_world_size(self.process_group))

    @property
    def _can_average(self) -> bool:
        """Returns whether the backend's reduce-scatter can average. That of gloo only sums."""
        return dist.get_backend(self.process_group) == dist.Backend.NCCL

    def before_forward(self) -> None:
        """Frees the slices of gradients that `zero_grad(set_to_none=True)` has cleared."""
        super().before_forward()  # type: ignore[misc]  # of the variant
        absent = {self.gradients.parameters[i] for i in self.gradients.stand_ins}  # but reduced
        for unit in self.units:
            if all(p.grad is None and p not in absent for p in unit.parameters):
                unit.gradient = None

    def begin_step(self, units: list[FlatUnit]) -> None:
        """Called by an optimizer before it steps the first of `units`, on all ranks."""

    def refuse_unfinished(self) -> None:
        """Raises RuntimeError while gradients are on their way; `fsdp` has stand-ins for them."""
        if self.step.is_in_the_middle():
            raise RuntimeError(UNFINISHED)

    def publish(self, unit: FlatUnit) -> None:
        """Called by the optimizer when `unit.shard` holds its new values."""

    def end_step(self, parameters: list[Parameter]) -> None:
        """Called by the optimizer at the end: every reader of `parameters` sees the new values."""

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        """Returns an optimizer that steps this rank's slices: see `ShardedOptimizer`.

        Args:
            cls: the class of an optimizer that treats every element alone.
            params: parameters or parameter groups; default all trainable parameters.
            options: further arguments of `cls`.
        """
        params = trainable(self.module) if params is None else params
        return ShardedOptimizer(self, cls, params, **options)  # type: ignore[arg-type]

    def exchange(
        self, status: str, wait: Callable[[dist.Work], object] = methodcaller("wait")
    ) -> list[str]:
        """Returns the status of every rank, or its first bytes; a collective call.

        It waits for other hosts, and for no GPU: a host that did would have nothing queued behind
        the last reduction, and the GPU would be idle while the optimizer's kernels are launched.
        """
        if self.world_size == 1:
            return [status]
        own = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
        if text := status.encode()[:STATUS_BYTES]:
            own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        everyone = own.new_empty(self.world_size, STATUS_BYTES)
        wait(gather_on_hosts(everyone, own, self.process_group))
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyone.tolist()]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradient of all ranks to a norm of at most `max_norm`; returns the norm.

        A collective call, between `finish_gradient_synchronization()` and `optimizer.step()`.
        """
        own = [gradient for *_, gradient in self.gradient_pieces()]
        shards = [unit.shard for unit in self.units]
        dtypes = [shard.dtype.to_real() for shard in shards]
        wide = reduce(torch.promote_types, dtypes, torch.float32)  # on ranks without pieces too
        square = torch.nn.utils.get_total_norm(own).to(shards[0].device, wide).square()
        dist.all_reduce(square, group=self.process_group)
        norm = square.sqrt()
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for unit in self.units:
            if unit.gradient is not None:
                unit.gradient.mul_(coefficient)
        return norm

    def gradient_pieces(self) -> list[tuple[Parameter, int, int, Tensor]]:
        """Returns what this rank owns of the reduced gradients.

        For each piece: the parameter, the first element in it (flattened), the number of elements,
        and a view of their gradient [numel], which `optimizer.step()` uses. Pieces without a
        gradient are left out.

        Raises:
            RuntimeError: before `finish_gradient_synchronization()`.
        """
        refuse_not_reduced(self.units)
        self.refuse_unfinished()
        return [
            (unit.parameters[piece.member], piece.offset, piece.numel, gradient)
            for unit in self.units
            for piece in unit.pieces
            if piece.numel and (gradient := unit.gradient_of(piece)) is not None
        ]

    @torch.no_grad()
    def whole_gradients(self) -> list[Tensor | None]:
        """Returns the reduced gradient of each parameter, in the order of `parameters()`.

        A collective call that takes the memory of all gradients: for tests and for debugging.
        """
        whole: dict[Parameter, Tensor] = {}
        for unit in self.units:
            if unit.gradient is None:
                continue
            for piece in unit.pieces:
                unit.gradient_of(piece)  # which makes it zero if the stand-in is
            for parameter, gradient in zip(
                unit.parameters, unit.gather(unit.gradient), strict=True
            ):
                if parameter.grad is not None:
                    whole[parameter] = gradient
        return [whole.get(parameter) for parameter in self.module.parameters()]


class ShardReduction(Reduction):
    """Knows where reduced gradients are. Each rank's part of one is what it owns of it."""

    place_of: dict[int, tuple[FlatUnit, int]]

    def share_of(self, i: int, reduced: Tensor) -> Tensor:
        unit, member = self.place_of[i]
        if not unit.is_stand_in(reduced):  # assigned by a user, the same on every rank
            return super().share_of(i, reduced)
        whole = unit.own_gradient_behind(reduced, member)
        return whole.mul_(self.contributors) if self.name == "mean" else whole
