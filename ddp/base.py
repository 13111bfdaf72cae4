"""The base of all variants: launches buckets of gradients in one order and waits for them.

The base class decides *when* a bucket of gradients is reduced: as soon as all its members are
ready, in one order on every rank (schedule.py). A variant decides *what* a bucket is (`plan`) and
*how* it is reduced (`launch`, `wait`). The phases of a step, as code and traces name them:

    forward   buffers are overwritten with those of rank 0
    ready     autograd's hook: a gradient is final for this backward
    launch    every member of the next bucket is ready: its reduction starts
    wait      the reduced values are in `.grad`
    finish    launch and wait for the rest, before `optimizer.step()`

internals/ holds the rest, one object per concern: skip it at the first reading.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.buckets import Bucket, Gradient, one_bucket_each
from ddp.internals.manual_gradients import ManualGradients
from ddp.internals.ownership import activate, shared_with_another
from ddp.internals.replicas import Replicas, group_or_default
from ddp.internals.step import Step
from ddp.internals.watch import Watch
from ddp.internals.wrapper import Wrapper
from ddp.join import Joinable
from ddp.schedule import Schedule


class DataParallel(ManualGradients, Joinable, Wrapper, nn.Module):
    """A network whose gradients are the mean (or the sum) of those of all ranks.

    Args:
        module: the network; its parameters and buffers are overwritten with rank 0's.
        reduce: `"mean"`, or `"sum"` for private training, where the divisor is a public constant.
        process_group: the ranks that hold replicas; default all.
        find_unused_parameters: accept parameters that take no part in a backward on some or all
            ranks. A rank without a gradient adds zero; if no rank has one, `.grad` stays.

    Raises:
        RuntimeError: if there is no process group or nothing to train, a parameter has no shape,
            or a wrapper of another network reduces it.
        ValueError: if the ranks hold different models (on every rank), or an unknown reduction.
    """

    options: ClassVar[tuple[str, ...]] = ("reduce", "process_group", "find_unused_parameters")
    launches_in_backward: ClassVar[bool] = True  # False: all in finish_gradient_synchronization

    def __init__(
        self,
        module: nn.Module,
        *,
        reduce: str = "mean",
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
    ):
        super().__init__()
        self.module = module
        self.process_group = group_or_default(process_group)
        self.world_size = dist.get_world_size(self.process_group)
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True  # False under no_sync(); PyTorch's name
        self.reduction = self.reduction_type(reduce, self.world_size)
        self.replicas = Replicas(module, self.process_group)
        if not self.is_copy:
            self.replicas.make_equal(obstacle=shared_with_another(module))
        activate(self, abandon=True)
        self.gradients = self.describe_gradients()
        if not self.gradients.parameters and not self.is_copy:
            raise RuntimeError("no parameter requires a gradient: there is nothing to synchronise")
        self.watch, self.schedule = Watch(self.gradients), Schedule()
        self.adopt_order(list(reversed(range(len(self.gradients.parameters)))))
        self.step = Step(self.gradients, self.schedule, self.watch)
        self.register_hooks()  # autograd calls before_accumulation and after_accumulation

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        """Returns which gradients are reduced together; the default reduces each alone."""
        return one_bucket_each(gradients, order)

    def launch(self, bucket: Bucket) -> Any:
        """Starts reducing the members' gradients; what it returns is handed to `wait`."""
        raise NotImplementedError

    def wait(self, bucket: Bucket, handle: Any) -> None:
        """Makes the reduced values visible in the members' gradients."""
        raise NotImplementedError

    def collect(self, i: int) -> None:
        """Called when gradient `i` is ready, before its bucket may be launched."""

    def before_forward(self) -> None:
        """Called before each synchronising forward, when no reduction is under way."""

    def gradient(self, i: int) -> Tensor:
        """Returns this rank's part of gradient `i`: its contiguous `.grad`, or zeros."""
        return self.gradients.local(i)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.step.begin_forward(self):  # not in evaluation or under no_sync()
            self.before_forward()
            self.replicas.broadcast_buffers()
        output = self.watch.call(self.module, args, kwargs)
        self.step.end_forward(self, output)
        return output

    @torch.no_grad()
    def before_accumulation(self, i: int) -> None:
        """Autograd's first hook: `.grad` of parameter `i` is about to change."""
        self.wait_for(self.schedule.bucket_of[i])
        self.gradients.make_local(i)

    @torch.no_grad()
    def after_accumulation(self, i: int) -> None:
        """Autograd's second hook: gradient `i` is final for this backward."""
        if self.step.arrive(self, i):  # not under no_sync()
            self.collect(i)
            if self.launches_in_backward:
                self.launch_buckets()

    def launch_buckets(self, everything: bool = False) -> None:
        """Launches the buckets that are complete, in the order of the plan."""
        for bucket in self.schedule.to_launch(everything, self.may_launch):
            for i in bucket.members:
                self.gradients.make_local(i)
            self.schedule.in_flight[bucket] = self.launch(bucket)
            self.step.record.note_launch(len(self.schedule.arrivals), bucket)

    def wait_for(self, *buckets: Bucket) -> None:
        """Blocks until the reductions of these buckets that are in flight have finished."""
        for bucket in buckets:
            if bucket in self.schedule.in_flight:
                self.wait(bucket, self.schedule.in_flight.pop(bucket))
                self.gradients.reduced.update(bucket.members)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Returns when every `.grad` holds the reduced gradient. A second call does nothing.

        Raises:
            RuntimeError: naming parameters without a gradient, unless `find_unused_parameters` is
                on, or one that has changed too early. The step is then discarded.
        """
        if self.step.unfinished and self.step.is_complete(self):
            self.launch_buckets(everything=True)
            self.wait_for(*self.schedule.in_flight)
            self.step.end(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enters a context in which gradients add up locally; a later backward reduces them."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def adopt_order(self, order: list[int]) -> None:
        """Plans again: rank 0's first order of arrival replaces the reverse of registration."""
        self.schedule.adopt(order, self.plan(self.gradients.describe(), order))
