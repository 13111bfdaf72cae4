"""Methods of a wrapper that take no part in its step: optimizers, statistics, `join`."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp.internals.gradients import Gradients, Reduction
from ddp.internals.hooks import AutogradHooks, retire_others, shared_with_another
from ddp.internals.ranks import group_or_default, leave_time_at_exit
from ddp.internals.replicas import Replicas
from ddp.internals.step import Launch, Step
from ddp.internals.watch import Watch, count_writes
from ddp.schedule import Bucket, Schedule

NOT_COPIED = (
    "a wrapper cannot be copied or pickled, because hooks and buffers belong to one: copy or save "
    "model.module, or model.state_dict(), and wrap that"
)
RETIRED = (
    "this network was wrapped again, and two wrappers would both reduce its gradients: use the "
    "last one, or wrap it anew"
)


class _Ended(Exception):
    """Ends a `join()` block on a rank that has more batches."""


class Interface(nn.Module):
    """The objects behind a wrapper, one a concern, and the methods that take no part in a step.

    Attributes:
        gradients, schedule, step, watch, replicas: see the files of these names.
        require_backward_grad_sync: False under no_sync(); PyTorch's name.
        gradients_come_by_hand: set by a private engine: autograd accumulates nothing, all comes
            through `gradient_ready`.
        is_retired: the network was wrapped again, and this wrapper has no hooks any more.

    Raises:
        RuntimeError: if there is no process group or nothing to train, a parameter has no shape,
            or a wrapper of another network reduces it.
        ValueError: if the ranks hold different models (on every rank), or an unknown reduction.
    """

    options: ClassVar[tuple[str, ...]]
    before_accumulation: Callable[[int], None]  # of base.py, as these are
    after_accumulation: Callable[[int], None]
    plan: Callable[..., list[Bucket]]
    wait_for: Callable[..., None]

    is_retired = False
    gradients_come_by_hand = False
    require_backward_grad_sync = True

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
        leave_time_at_exit()
        self.find_unused_parameters = find_unused_parameters
        self.reduction = self.make_reduction(reduce)
        self.replicas = Replicas(module, self.process_group)
        self.replicas.make_equal(obstacle=shared_with_another(module))
        retire_others(module)
        self.gradients = self.describe_gradients()
        self.gradient = self.gradients.local
        self.schedule = Schedule()
        self.watch = Watch(module, self.gradients)
        self.step = Step(self.gradients, self.schedule, self.watch)
        self.adopt_order(list(reversed(range(len(self.gradients.parameters)))))
        self.hooks = AutogradHooks(self)  # calls before_ and after_accumulation from now on
        weakref.finalize(self, self.hooks.remove).atexit = False

    def make_reduction(self, name: str) -> Reduction:
        return Reduction(name, self.world_size)

    def describe_gradients(self) -> Gradients:
        """Called at construction, once all ranks hold the same values."""
        return Gradients(self.module, self.reduction)

    def adopt_order(self, order: list[int]) -> None:
        """Plans again: rank 0's first order of arrival replaces the reverse of registration."""
        self.schedule.adopt(order, self.plan(order))

    def share_buffers(self) -> None:
        """Overwrites buffers with those of rank 0, before each synchronising forward."""
        self.replicas.broadcast_buffers(self.watch.buffers)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enters a context in which gradients add up locally; a later backward reduces them."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Enters a context that ends on all ranks as soon as the batches of one have ended.

        Enter it around the loop over batches, on all ranks. Each training forward asks the other
        ranks first. Where one has left its loop, the forward raises an exception that ends the
        block quietly: what a rank has more than others is left out, and all have taken the same
        steps. PyTorch's `DistributedDataParallel.join()` trains on the rest, without those ranks.
        """

        def ask(*_: Any) -> None:
            if self.training and torch.is_grad_enabled() and self.any_rank(False):
                raise _Ended

        handle = self.register_forward_pre_hook(ask, prepend=True)
        try:
            yield
            self.any_rank(True)
        except _Ended:
            pass
        finally:
            handle.remove()

    def any_rank(self, mine: bool) -> bool:
        """Returns whether it is true on any rank; collective, and the host waits."""
        found = torch.tensor(float(mine), device=self.gradients.parameters[0].device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.process_group)
        return bool(found)

    def before_gradient(self, parameter: Parameter) -> None:
        """Prepares `parameter.grad` for a further addition, under `no_sync` too.

        Afterwards no collective is writing to it, it is of `gradient_dtype`, and what it holds is
        this rank's part: nothing, what was accumulated so far, or its share of what is reduced.

        Raises:
            ValueError: if the parameter is not one of the module's trainable ones.
        """
        i = self._index_of(parameter, "before_gradient")
        with torch.no_grad():
            self.before_accumulation(i)

    def gradient_ready(self, parameter: Parameter) -> None:
        """Announces that `parameter.grad` is final for this backward and may be reduced.

        Call it for all parameters before the next forward, which takes an incomplete step for
        a step that failed, and discards it.

        Raises:
            ValueError: if the parameter is not one of the module's trainable ones.
            RuntimeError: for a gradient that is missing, sparse or not of `gradient_dtype`.
        """
        i = self._index_of(parameter, "gradient_ready")
        if parameter.grad is None:
            raise RuntimeError(f"gradient_ready: {self.gradients.names[i]} has no gradient")
        self.gradients.filled.discard(i)
        with torch.no_grad():
            self.after_accumulation(i)

    def _index_of(self, parameter: Parameter, caller: str) -> int:
        i = self.gradients.index_of(parameter)
        if i < 0:
            raise ValueError(f"{caller}: not a trainable parameter of the wrapped module")
        self.refuse_retired()
        return i

    @property
    def reduce(self) -> str:
        """Returns `"mean"` or `"sum"`, the reduction over ranks."""
        return self.reduction.name

    @reduce.setter
    def reduce(self, value: str) -> None:
        self.reduction.choose(value)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Returns the smallest dtype of `.grad` and its collective; None: the parameter's own.

        With `torch.float32`, gradients of 16-bit parameters are float32, others stay as they are.
        Set it between steps, on all ranks; gradients that exist are converted. Some optimizers
        need a `.grad` of the parameter's own dtype. To replace it, set the parameter's
        `grad_dtype`. The next training forward, or the next `before_gradient`, restores it.

        Raises:
            ValueError: for a dtype that is not a floating one.
            RuntimeError: in the middle of a step, where gradients are on their way.
        """
        return self.gradients.dtypes.least

    @gradient_dtype.setter
    def gradient_dtype(self, value: torch.dtype | None) -> None:
        if value is not None and not value.is_floating_point:
            raise ValueError(f"gradient_dtype: {value} is not a floating type")
        dtypes = self.gradients.dtypes
        before, old = dtypes.all, dtypes.least
        dtypes.set_least(value)
        if dtypes.all == before:
            return
        if self.step.is_in_the_middle():
            dtypes.set_least(old)
            raise RuntimeError(
                "gradient_dtype cannot change in the middle of a step: "
                "call finish_gradient_synchronization first"
            )
        dtypes.give()
        self.adopt_order(self.schedule.order)

    def make_optimizer(
        self, cls: Callable[..., Optimizer], params: Any = None, **options: Any
    ) -> Optimizer:
        """Returns an optimizer: `optimizer = model.make_optimizer(torch.optim.AdamW, lr=1e-3)`.

        Args:
            cls: the class of the optimizer.
            params: parameters or parameter groups; default all trainable parameters.
            options: further arguments of `cls`.
        """
        optimizer = cls(trainable(self.module) if params is None else params, **options)
        optimizer.register_step_post_hook(count_writes)
        return optimizer

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradient to a norm of at most `max_norm`; returns the norm it had.

        Call it between `finish_gradient_synchronization()` and `optimizer.step()`.
        """
        return torch.nn.utils.clip_grad_norm_(trainable(self.module), max_norm)

    def whole_gradients(self) -> list[Tensor | None]:
        """Returns the reduced gradient of each parameter, in the order of `parameters()`."""
        return [parameter.grad for parameter in self.module.parameters()]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self.watch.accept_changes()
        return result

    def count(self, collectives: int, nbytes: int) -> None:
        """Adds to what `stats` returns. A `launch` that does not has sent its bucket once."""
        self.step.record.count(nbytes, collectives)
        self.step.record.counted.add(len(self.step.record.launches))  # the launch that runs now

    def stats(self) -> dict[str, int]:
        """Returns the collectives and bytes of this rank's last finished step.

        `collectives` started, `bytes` of gradients handed to them (an all-reduce in a ring moves
        2(W-1)/W times as many over each link) and of gathered parameters, and `buckets` in the
        plan.
        """
        return self.step.finished.stats()

    def launches(self) -> list[Launch]:
        """Returns the launches of the last finished step on this rank, in order."""
        return [
            Launch(ready, bucket.nbytes, tuple(self.gradients.names[i] for i in bucket.members))
            for ready, bucket in self.step.finished.launches
        ]

    def retire(self) -> None:
        """Discards an unfinished step: another wrapper of this network takes over for good."""
        self.wait_for(*self.schedule.in_flight)
        self.step.begin()
        self.hooks.remove()
        self.is_retired = True

    def refuse_retired(self) -> None:
        if self.is_retired:
            raise RuntimeError(RETIRED)

    def __reduce__(self) -> NoReturn:  # copy.deepcopy calls it, too
        raise RuntimeError(NOT_COPIED)


def trainable(module: nn.Module) -> list[Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def mebibytes(bucket_size_mb: float | None) -> int | None:
    """Returns the bytes of the option `bucket_size_mb`, which is in MiB as in PyTorch's DDP.

    None, which means one bucket, stays None.

    Raises:
        ValueError: if it is not a positive finite number.
    """
    if bucket_size_mb is None:
        return None
    if isinstance(bucket_size_mb, str) or not 0 < bucket_size_mb < inf:
        raise ValueError(
            f"bucket_size_mb: {bucket_size_mb} is not a positive number of MiB, nor None for one "
            "bucket"
        )
    return int(bucket_size_mb * (1 << 20))
