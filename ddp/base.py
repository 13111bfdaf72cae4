"""The base of all variants: launches buckets of gradients in one order and waits for them.

The base class decides *when* a bucket of gradients is reduced: as soon as all its members are
ready, in one order on every rank (schedule.py). A variant decides *what* a bucket is (`plan`) and
*how* it is reduced (`launch`, `wait`). The phases of a step, as code and traces name them:

    forward   buffers are overwritten with those of rank 0
    ready     autograd's hook: a gradient is final for this backward
    launch    every member of the next bucket is ready: its reduction starts
    wait      the reduced values are in `.grad`
    finish    launch and wait for the rest, before `optimizer.step()`

What `launch(bucket)` and `wait(bucket, handle)` may touch, and nothing else:

    bucket.members           indices of the gradients to reduce; bucket.offsets, in a flat buffer
    self.gradient(i)         this rank's part of gradient `i`: its `.grad`, contiguous; zeros if it
                             has none. A slice of a flat buffer with these values may replace it
    self.reduction           its `name`, "mean" or "sum", and its `op` for a collective
    self.process_group       the ranks, `self.world_size` of them

From `launch` to the end of `wait` nobody else reads or writes these gradients, and afterwards they
have the reduced values. internals/ holds what a step needs beside this: skip it at first.
"""

from typing import Any, ClassVar

import torch

from ddp.buckets import plan_buckets
from ddp.internals.interface import Interface
from ddp.schedule import Bucket


class DataParallel(Interface):
    """A network whose gradients are the mean (or the sum) of those of all ranks.

    Args:
        module: the network; its parameters and buffers are overwritten with rank 0's.
        reduce: `"mean"`, or `"sum"` for private training, where the divisor is a public constant.
        process_group: the ranks that hold replicas; default all.
        find_unused_parameters: accept parameters that take no part in a backward on some or all
            ranks. A rank without a gradient adds zero; if no rank has one, `.grad` stays.
    """

    options: ClassVar[tuple[str, ...]] = ("reduce", "process_group", "find_unused_parameters")
    launches_in_backward: ClassVar[bool] = True  # False: all in finish_gradient_synchronization
    bucket_bytes: int | None = 0  # a bucket's capacity; 0: each gradient alone

    def plan(self, order: list[int]) -> list[Bucket]:
        """Returns which gradients are reduced together; the default fills `bucket_bytes`."""
        return plan_buckets(self.gradients.describe(), order, self.bucket_bytes)

    def launch(self, bucket: Bucket) -> Any:
        """Starts reducing the members' gradients; what it returns is handed to `wait`."""
        raise NotImplementedError

    def wait(self, bucket: Bucket, handle: Any) -> None:
        """Makes the reduced values visible in the members' gradients."""
        handle.wait()

    def collect(self, i: int) -> None:
        """Called when gradient `i` is ready, before its bucket may be launched."""

    def before_forward(self) -> None:
        """Called before each synchronising forward, when no reduction is under way."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.step.begin_forward(self):  # not in evaluation or under no_sync()
            self.before_forward()
            self.share_buffers()
        output = self.watch.call(self.module, args, kwargs)
        self.step.end_forward(self, output)
        return output

    def before_accumulation(self, i: int) -> None:
        """Autograd's first hook: `.grad` of parameter `i` holds something, and is about to grow."""
        self.wait_for(self.schedule.bucket_of[i])
        self.gradients.make_local(i)

    def after_accumulation(self, i: int) -> None:
        """Autograd's second hook: gradient `i` is final for this backward."""
        if self.step.arrive(self, i):  # not under no_sync()
            self.collect(i)
            if self.launches_in_backward:
                self.launch_buckets()

    def launch_buckets(self, everything: bool = False, most: int | None = None) -> None:
        """Launches the next buckets of the plan, up to one that is incomplete; or `everything`."""
        schedule = self.schedule
        for bucket in schedule.buckets[schedule.launched :][:most]:
            if not everything and not schedule.ready.issuperset(bucket.members):
                return
            if not self.gradients.reduced.isdisjoint(bucket.members):  # in an earlier backward
                self.gradients.make_local(*bucket.members)
            schedule.in_flight[bucket] = self.launch(bucket)
            schedule.launched += 1
            self.step.record.launches.append((len(schedule.arrivals), bucket))

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
