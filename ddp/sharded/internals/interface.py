"""Methods of a sharded wrapper that take no part in a backward: a training loop's, in its units.

They are those of `ddp.internals.interface.Interface`, and `gradient_pieces` for code that works on
gradients element by element. The optimizer calls the others.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.base import DataParallel
from ddp.internals.interface import trainable
from ddp.sharded.internals.gradients import DividedGradients
from ddp.sharded.internals.views import gather, refuse_moved
from ddp.sharded.layout import FlatUnit
from ddp.sharded.optimizer import ShardedOptimizer
from ddp.sharded.torch_compat import gather_on_hosts, gloo_beside
from ddp.torch_compat import without_torch_functions

STATUS_BYTES = 400  # of a message to other ranks

NOT_REDUCED = (
    "{name} has a gradient that is this rank's alone: call "
    "finish_gradient_synchronization() between backward() and optimizer.step(); to change reduced "
    "gradients, write to those that model.gradient_pieces() returns"
)
UNFINISHED = (
    "gradients are on their way to other ranks, or this rank's alone: call "
    "finish_gradient_synchronization() after backward()"
)


class ShardedInterface(DataParallel):
    """A network whose ranks each own one slice of every unit.

    Attributes:
        units: parameters that lie together.
    """

    gradients: DividedGradients
    divide: Callable[[], list[FlatUnit]]  # of base.py

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        if self.world_size > 1:
            gloo_beside(self.process_group)

    def describe_gradients(self) -> DividedGradients:
        self.units = self.divide()
        return DividedGradients(self.module, self.reduction, self.units)

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        """Returns an optimizer that steps this rank's slices: see `ShardedOptimizer`."""
        params = trainable(self.module) if params is None else params
        return ShardedOptimizer(self, cls, params, **options)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradient of all ranks to a norm of at most `max_norm`; returns the norm.

        A collective call, between `finish_gradient_synchronization()` and `optimizer.step()`.
        """
        own = [gradient for *_, gradient in self.gradient_pieces()]
        dtypes = [unit.shard.dtype.to_real() for unit in self.units]
        wide = reduce(torch.promote_types, dtypes, torch.float32)  # on ranks without pieces too
        square = torch.nn.utils.get_total_norm(own).to(self.units[0].shard.device, wide).square()
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
        with without_torch_functions():  # of stand-ins
            self.refuse_not_reduced()
            return [
                (piece.parameter, piece.of_whole.start, gradient.numel(), gradient)
                for piece in self.gradients.pieces
                if (gradient := self.gradients.of(piece)) is not None and gradient.numel()
            ]

    @torch.no_grad()
    def whole_gradients(self) -> list[Tensor | None]:
        """Returns the reduced gradient of each parameter, in the order of `parameters()`.

        A collective call that takes the memory of all gradients: for tests and for debugging.
        """
        whole: dict[Parameter, Tensor] = {}
        for piece in self.gradients.pieces:
            self.gradients.of(piece)  # zero, if its stand-in was made so
        for unit in self.units:
            if unit.gradient is not None:
                whole |= zip(unit.parameters, gather(unit, unit.gradient), strict=True)
        return [None if p.grad is None else whole.get(p) for p in self.module.parameters()]

    def before_forward(self) -> None:
        """Frees slices of gradients that `zero_grad(set_to_none=True)` has cleared."""
        with without_torch_functions():  # which would take 10 times as long
            for unit in self.units:
                if all(self.gradients.parameters[i].grad is None for i in unit.members):
                    unit.gradient = None

    def begin_step(self, units: list[FlatUnit]) -> None:
        """Called before the first unit is stepped, whose parameters must be views of its values."""
        for unit in units:
            refuse_moved(unit, [self.gradients.names[i] for i in unit.members])

    def refuse_not_reduced(self) -> None:
        """Raises RuntimeError unless each `.grad` is None or stands for a reduced gradient."""
        if (name := self.gradients.not_reduced()) is not None:
            raise RuntimeError(NOT_REDUCED.format(name=name))
        if self.step.is_in_the_middle():  # `.grad` has stand-ins already
            raise RuntimeError(UNFINISHED)

    def exchange(self, status: str) -> list[str]:
        """Returns the status of every rank, or its first bytes; a collective call.

        It waits for other hosts, and for no GPU: a host that did would have nothing queued behind
        the last reduction, and the GPU would be idle while the optimizer's kernels are launched.
        """
        if self.world_size == 1:
            return [status]
        text = status.encode()[:STATUS_BYTES].ljust(STATUS_BYTES, b"\0")
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = own.new_empty(self.world_size, STATUS_BYTES)
        gather_on_hosts(everyone, own, self.process_group).wait()
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyone.tolist()]
