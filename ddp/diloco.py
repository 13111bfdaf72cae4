"""`diloco`: each rank takes many steps alone, then all take one together.

The problem with all variants before: every step sends every gradient. Where the network between
ranks takes longer for that than a backward, no overlap hides it.

The idea (DiLoCo, https://arxiv.org/abs/2311.08105): a rank takes H steps of its own optimizer with
its own gradients, which nobody reduces. Where that has moved it from is a gradient, too: all ranks
go back to where the round began, and take one step of SGD with Nesterov momentum along their mean.

    delta = start - mean over ranks of where they are       the pseudo-gradient
    momentum = outer_momentum * momentum + delta
    start = start - outer_lr * (delta + outer_momentum * momentum)

One all-reduce of the parameters' size in H steps: 1/H of the bytes, and ranks wait for the slowest
one of them once in H steps.

What remains: H steps apart are worth less than H steps together, the more so the larger H is. The
exchange itself is exposed, for nothing is computed beside it. `start` and `momentum` are two more
copies of the parameters.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.bucketed import BucketedDDP
from ddp.internals import rounds
from ddp.schedule import Bucket
from ddp.torch_compat import version_of

NOT_COUNTED = (
    "{name} has changed since finish_gradient_synchronization(), and diloco has counted no step: "
    "make the optimizer by model.make_optimizer(torch.optim.AdamW, lr=...)"
)
IN_A_ROUND = (
    "state_dict() after {steps} of the {every} steps of a round, so these are the parameters of "
    "this rank alone: call model.outer_step() on all ranks before the last state_dict()"
)
WAITED = (
    "diloco waited for the other ranks in an outer step: every rank must take as many steps of its "
    "optimizer as the others, and call model.outer_step() where they do"
)
NOT_PRIVATE = (
    "diloco steps with the gradients of one rank, where privacy needs the noisy sum of all ranks",
    'give ddp.wrap("ddp_bucketed", network), or another variant that reduces each gradient',
)


class DilocoDDP(BucketedDDP):
    """Trains ranks apart for `every` steps of their optimizers, then takes one outer step.

    It is taken at the end of the last step, or in the next training forward if several optimizers
    were made and not all have taken as many. `outer_step()` takes it earlier: call it at the end of
    training, where the number of steps is no multiple of `every`.

    Args:
        every: local steps in a round, 1 or more.
        outer_lr: the outer step's learning rate; 1 with `outer_momentum=0` is the plain mean.
        outer_momentum: its Nesterov momentum, below 1.
        bucket_size_mb: as of `BucketedDDP`.
    """

    options = (*BucketedDDP.options[1:], "every", "outer_lr", "outer_momentum")  # without "reduce"
    refuses_privacy = NOT_PRIVATE  # dp_clipping says why, and what to give

    def __init__(
        self,
        module: nn.Module,
        *,
        every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **options: Any,
    ):
        rounds.check(every, outer_lr, outer_momentum)
        self.every, self.outer_lr, self.outer_momentum = every, outer_lr, outer_momentum
        self.counts: list[int] = []  # steps in this round, of each optimizer that was made
        self.start: list[Tensor] = []  # parameters where this round began; empty before its first
        self.momentum: list[Tensor] = []
        self._seen: list[int] = []  # versions of the parameters since the last finish
        super().__init__(module, **options)

    def launch_buckets(self, everything: bool = False, most: int | None = None) -> None:
        """Launches nothing: an optimizer steps with this rank's own gradients."""

    def collect(self, i: int) -> None:
        """Leaves the gradient where it is."""

    def share_buffers(self) -> None:
        """Leaves buffers alone: the outer step makes them those of rank 0."""

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        optimizer = super().make_optimizer(cls, params, **options)
        number = len(self.counts)
        self.counts.append(0)
        optimizer.register_step_pre_hook(lambda *_: self.begin_round())
        optimizer.register_step_post_hook(lambda *_: self.end_local_step(number))
        optimizer.register_state_dict_post_hook(partial(rounds.save, self, number))
        optimizer.register_load_state_dict_pre_hook(partial(rounds.load, self, number))
        return optimizer

    def begin_round(self) -> None:
        """Notes where the parameters are before the first step of a round."""
        if not self.start:
            self.start = [p.detach().clone() for p in self.gradients.parameters]

    def end_local_step(self, number: int) -> None:
        self.counts[number] += 1
        if min(self.counts) >= self.every:
            self.outer_step()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_steps_that_are_not_counted()
        if self.training and torch.is_grad_enabled() and max(self.counts, default=0) >= self.every:
            self.outer_step()
        output = super().forward(*args, **kwargs)
        if self._seen:  # a forward may write to parameters, as Embedding(max_norm=1) does
            self._note_versions()
        return output

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        self._note_versions()

    def _note_versions(self) -> None:
        """Notes the versions of the parameters, as long as no optimizer was made to be counted."""
        self._seen = [] if self.counts else [version_of(p) for p in self.gradients.parameters]

    def _refuse_steps_that_are_not_counted(self) -> None:
        for i, version in enumerate([] if self.counts else self._seen):
            if version_of(self.gradients.parameters[i]) != version:
                raise RuntimeError(NOT_COUNTED.format(name=self.gradients.names[i]))

    @torch.no_grad()
    def outer_step(self) -> None:
        """Ends the round: all ranks take one step together. A collective call.

        Does nothing if no rank has taken a step since the last one.

        Raises:
            RuntimeError: from the backend, with a note, if other ranks do not come here in time.
        """
        try:
            if not self.any_rank(any(self.counts)):
                return
            self.begin_round()
            self.momentum = self.momentum or [torch.zeros_like(start) for start in self.start]
            launches = ((bucket, self.launch(bucket)) for bucket in self.schedule.buckets)
            on_the_wire = next(launches)
            for following in launches:  # is sent while the one before is stepped
                self.wait(*on_the_wire)
                on_the_wire = following
            self.wait(*on_the_wire)
            super().share_buffers()
        except RuntimeError as error:
            error.add_note(WAITED)
            raise
        self._forget_round()

    def launch(self, bucket: Bucket) -> Any:
        """Starts to average the members' pseudo-gradients."""
        parameters, flat = self.gradients.parameters, self.flat(bucket)
        del self.flats[bucket]  # a round may be long
        for i, delta in flat.slices.items():
            delta.copy_(self.start[i] - parameters[i])
        work = dist.all_reduce(flat.buffer, dist.ReduceOp.AVG, self.process_group, async_op=True)
        # This is the end of the last step.
        self.step.finished.launches.append((len(parameters), bucket))
        return work, flat

    def wait(self, bucket: Bucket, handle: Any) -> None:
        """Takes the outer step of the members, once their mean pseudo-gradients are there."""
        work, flat = handle
        work.wait()
        for i, delta in flat.slices.items():
            parameter, start = self.gradients.parameters[i], self.start[i]
            if parameter.requires_grad:  # it may have been frozen since
                momentum = self.momentum[i].mul_(self.outer_momentum).add_(delta)
                start.sub_(delta.add_(momentum, alpha=self.outer_momentum), alpha=self.outer_lr)
                parameter.copy_(start)

    def _forget_round(self) -> None:
        self.start, self.counts, self._seen = [], [0] * len(self.counts), []

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the network's state, which is this rank's own in the middle of a round."""
        if steps := max(self.counts, default=0):
            warnings.warn(IN_A_ROUND.format(steps=steps, every=self.every), stacklevel=2)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Takes parameters, with which a round begins. Load the optimizer's state afterwards."""
        result = super().load_state_dict(*args, **kwargs)
        self._forget_round()
        return result
