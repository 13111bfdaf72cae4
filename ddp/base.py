"""The seam: what every data-parallel variant shares, so that its own file can hold its one idea.

The base class decides *when* a bucket of gradients is reduced: as soon as all its members are
ready, and in one agreed order on every rank. A variant decides *what* a bucket is (`plan`) and
*how* it travels (`launch`, `wait`).

One step of a rank, in the words used by code, documents, traces and pictures:

    forward   buffers follow rank 0; a step that was left half-way is discarded
    ready     a gradient is final for this backward: autograd's hook, or the private engine, says so
    launch    every member of the next bucket in the agreed order is ready: its reduction starts
    wait      the reduced values are in `.grad`
    finish    launch and wait for whatever is left, before `optimizer.step()`

Collectives match by call order alone. If two ranks launched the same buckets in another order,
gradients of different parameters would be summed without any error, so nothing is launched in the
order in which it happens to become ready: a bucket waits for its predecessors. The agreed order is
the reverse of registration in the first step and then, once, the order that rank 0 has observed.

Several backwards before one finish each reduce what they add. A reduced gradient is the same on
all ranks; reducing it again together with new local terms leaves its mean unchanged, and under
`reduce="sum"` each rank first takes back its share, 1/W of it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.buckets import Bucket, Gradient, one_bucket_each
from ddp.checks import broadcast_from_rank_0, check_same_model
from ddp.unused import parameters_reached_by

REDUCTIONS = ("mean", "sum")


class DataParallel(nn.Module):
    """A network whose gradients are the mean (or the sum) of those of all ranks.

    Args:
        module: the network; its parameters and buffers are overwritten with rank 0's.
        reduce: `"mean"` for ordinary training, `"sum"` for private training, where the divisor
            is a public constant.
        process_group: the ranks that hold replicas; default all.
        find_unused_parameters: accept parameters that take no part in a backward on some or all
            ranks. A rank that did not use a parameter contributes zero; one that nobody used
            keeps its `.grad` untouched.

    Raises:
        RuntimeError: if no process group is initialised, or the module has nothing to train.
        ValueError: if the ranks hold different models (on every rank), or an unknown reduction.
    """

    launches_in_backward: ClassVar[bool] = True
    """False for a variant that launches everything in `finish_gradient_synchronization`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        reduce: str = "mean",
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
    ):
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError("no process group: call torch.distributed.init_process_group first")
        self.module = module
        self.reduce = reduce
        self.process_group = process_group or dist.group.WORLD
        self.world_size = dist.get_world_size(self.process_group)
        self.find_unused_parameters = find_unused_parameters

        check_same_model(module, self.process_group)
        broadcast_from_rank_0([*module.parameters(), *module.buffers()], self.process_group)

        self._parameters_by_index = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters_by_index:
            raise RuntimeError("no parameter requires a gradient: there is nothing to synchronise")
        self._index = {p: i for i, p in enumerate(self._parameters_by_index)}
        self._names = _full_names(module)
        self._synchronizing = True
        self._order_is_observed = False
        self._reduced: set[int] = set()  # `.grad` holds the same reduced value on all ranks
        self._used: set[int] = set()  # got a local gradient since it was last reduced
        self._stats = {"collectives": 0, "bytes": 0, "buckets": 0}
        self._adopt_order(list(reversed(range(len(self._parameters_by_index)))))
        self._begin_step()
        self._register_hooks()

    # ---- what a variant says -------------------------------------------------------------------

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        """Which gradients travel together; the default sends each alone."""
        return one_bucket_each(gradients, order)

    def launch(self, bucket: Bucket) -> Any:
        """Start reducing the members' gradients; what is returned is handed to `wait`."""
        raise NotImplementedError

    def wait(self, bucket: Bucket, handle: Any) -> None:
        """Make the reduced values visible in the members' gradients."""
        raise NotImplementedError

    def before_forward(self) -> None:
        """Called before each synchronising forward, when no reduction is under way."""

    # ---- what a user calls ---------------------------------------------------------------------

    def forward(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled() and self._synchronizing):
            return self.module(*args, **kwargs)
        self._prepare_step()
        output = self.module(*args, **kwargs)
        if self.find_unused_parameters:
            self._reached |= {
                self._index[p] for p in parameters_reached_by(output) if p in self._index
            }
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate locally; the next one outside reduces the whole sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @torch.no_grad()
    def gradient_ready(self, parameter: Parameter) -> None:
        """`parameter.grad` is final for this backward and may be reduced.

        Autograd's hook calls this in ordinary training; a private engine calls it when a clipped
        sum is final.

        Raises:
            ValueError: if the parameter is not one of the module's trainable ones.
            RuntimeError: for a sparse gradient, or when one parameter gets a second gradient
                while another has none, so that ranks could disagree on what is reduced.
        """
        i = self._index.get(parameter)
        if i is None:
            raise ValueError("gradient_ready: not a trainable parameter of the wrapped module")
        if parameter.grad is None:
            raise RuntimeError(f"gradient_ready: {self._names[parameter]} has no gradient")
        if parameter.grad.layout != torch.strided:
            raise RuntimeError(
                f"{self._names[parameter]} has a sparse gradient, which no variant reduces: "
                "build its embedding with sparse=False"
            )
        self._used.add(i)
        if not self._synchronizing:
            return
        self._unfinished = True
        self._reduced.discard(i)
        if self._bucket_of[i] < self._launched:
            self._ready_again(i)
        self._arrivals[i] = self._arrivals.get(i, 0) + 1
        self._ready.add(i)
        if self.launches_in_backward:
            self._mark_unreached_ready()
            self._launch_complete_buckets()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return when every `.grad` holds the reduced gradient. A second call does nothing.

        Raises:
            RuntimeError: if some parameters got no gradient and `find_unused_parameters` is off;
                the message names them. The step is then discarded.
        """
        if not self._unfinished:
            return
        if self.find_unused_parameters:
            self._ready.update(range(len(self._parameters_by_index)))
        else:
            self._raise_if_incomplete()
        self._launch_complete_buckets(everything=True)
        self._wait_for_all()
        if self.find_unused_parameters:
            self._settle_unused()
        self._stats = dict(self._counters, buckets=len(self._buckets))
        if not self._order_is_observed:
            self._agree_on_order()
        self._used.clear()
        self._begin_step()

    def stats(self) -> dict[str, int]:
        """Of the last finished step, on this rank.

        `collectives` started for gradients, `bytes` of gradients handed to them (a ring moves
        2(W-1)/W times as many over each link), and `buckets` in the plan.
        """
        return dict(self._stats)

    @property
    def reduce(self) -> str:
        return self._reduce

    @reduce.setter
    def reduce(self, value: str) -> None:
        if value not in REDUCTIONS:
            raise ValueError(f"reduce: {value!r} is unknown, choose one of {', '.join(REDUCTIONS)}")
        self._reduce = value

    # ---- helpers for variants ------------------------------------------------------------------

    @property
    def reduce_op(self) -> dist.ReduceOp.RedOpType:
        """The collective's own operation: averaging inside it saves a pass over memory."""
        return dist.ReduceOp.AVG if self.reduce == "mean" else dist.ReduceOp.SUM

    def gradient(self, i: int) -> Tensor:
        """What this rank adds to parameter `i`: its `.grad`, contiguous, or zeros if it has none."""
        parameter = self._parameters_by_index[i]
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            return self.stand_in(i, zeros)
        if not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()  # ranks may hold different strides
        return parameter.grad

    def stand_in(self, i: int, tensor: Tensor) -> Tensor:
        """Reduce `tensor` for the unused parameter `i`; it becomes `.grad` if another rank used it."""
        self._stand_ins[i] = tensor
        return tensor

    def count(self, collectives: int, nbytes: int) -> None:
        self._counters["collectives"] += collectives
        self._counters["bytes"] += nbytes

    # ---- rounds: every bucket once, in the agreed order ----------------------------------------

    def _begin_step(self) -> None:
        self._unfinished = False
        self._counters = {"collectives": 0, "bytes": 0}
        self._arrivals: dict[int, int] = {}  # index -> gradients so far, first arrival first
        self._reached: set[int] = set()
        self._late = False
        self._stand_ins: dict[int, Tensor] = {}
        self._begin_round()

    def _begin_round(self) -> None:
        self._ready: set[int] = set()
        self._launched = 0  # buckets launched so far, and the next one to launch
        self._in_flight: dict[int, Any] = {}

    def _launch_complete_buckets(self, everything: bool = False) -> None:
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if not (everything or self._ready.issuperset(bucket.members)):
                return
            for i in bucket.members:
                self._take_back_share(i)
            self._in_flight[self._launched] = self.launch(bucket)
            self._launched += 1

    def _wait_for_all(self) -> None:
        for number in list(self._in_flight):
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        bucket = self._buckets[number]
        self.wait(bucket, self._in_flight.pop(number))
        self._reduced.update(bucket.members)

    def _ready_again(self, i: int) -> None:
        """A second backward before finish adds to a gradient that has been sent already."""
        if self._bucket_of[i] in self._in_flight:
            self._wait_for(self._bucket_of[i])
            self._reduced.discard(i)
        if self._launched == len(self._buckets) and not self.find_unused_parameters:
            self._wait_for_all()
            self._begin_round()
        elif not self.find_unused_parameters:
            raise RuntimeError(
                f"{self._names[self._parameters_by_index[i]]} got a second gradient while "
                f"{self._show_names(self._missing())} got none: use no_sync() for all but the "
                "last backward, or find_unused_parameters=True"
            )
        else:
            # Ranks differ in what they use, so which of them needs another round is only
            # known, and agreed upon, at finish.
            self._late = True
            if i in self._stand_ins:
                reduced = self._stand_ins.pop(i)
                share = 1 if self.reduce == "mean" else 1 / self.world_size
                self._parameters_by_index[i].grad.add_(reduced, alpha=share)

    def _take_back_share(self, i: int) -> None:
        """Turn a reduced gradient into this rank's part of it, to be reduced again."""
        if i in self._reduced:
            self._reduced.discard(i)
            gradient = self._parameters_by_index[i].grad
            if gradient is not None and self.reduce == "sum":
                gradient.div_(self.world_size)

    @torch.no_grad()
    def _before_accumulation(self, i: int) -> None:
        """Autograd is about to add to `.grad`: no collective may be writing to it."""
        if self._bucket_of[i] in self._in_flight:
            self._wait_for(self._bucket_of[i])
        self._take_back_share(i)

    def _prepare_step(self) -> None:
        if self.find_unused_parameters:
            # Other ranks may have launched what this one did not reach: complete the round,
            # so that all have issued the same collectives before the buffers' broadcast.
            if self._arrivals:
                self._launch_complete_buckets(everything=True)
        elif self._arrivals and self._missing():
            self._discard_step()
        self._wait_for_all()
        self.before_forward()
        broadcast_from_rank_0(list(self.module.buffers()), self.process_group)
        self._unfinished = True

    def _discard_step(self) -> None:
        self._wait_for_all()
        self._begin_step()

    # ---- parameters without a gradient ---------------------------------------------------------

    def _missing(self) -> list[int]:
        """Parameters that got fewer gradients than others in this step."""
        expected = max(self._arrivals.values(), default=1)
        count = len(self._parameters_by_index)
        return [i for i in range(count) if self._arrivals.get(i, 0) < expected]

    def _raise_if_incomplete(self) -> None:
        missing = self._missing()
        if not missing:
            return
        message = (
            f"unfinished reduction: {self._show_names(missing)} got no gradient in the last "
            "backward; if that is meant, pass find_unused_parameters=True"
        )
        try:
            self._discard_step()
        except RuntimeError as error:  # the other ranks never launched what this one waits for
            raise RuntimeError(message) from error
        raise RuntimeError(message)

    def _mark_unreached_ready(self) -> None:
        """What no forward of this step leads to need not hold up the buckets behind it."""
        if self.find_unused_parameters and self._reached and len(self._arrivals) == 1:
            self._ready.update(set(range(len(self._parameters_by_index))) - self._reached)

    def _settle_unused(self) -> None:
        """Agree on who was used anywhere, and on whether a second round is needed."""
        count = len(self._parameters_by_index)
        device = self._parameters_by_index[0].device
        flags = torch.zeros(count + 1, dtype=torch.int32, device=device)
        flags[[i for i in self._used if self._parameters_by_index[i].grad is not None]] = 1
        flags[count] = int(self._late)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        *used, late = flags.tolist()
        self._adopt_stand_ins(used)
        if late:
            self._begin_round()
            self._launch_complete_buckets(everything=True)
            self._wait_for_all()
            self._adopt_stand_ins(used)

    def _adopt_stand_ins(self, used: list[int]) -> None:
        for i, reduced in self._stand_ins.items():
            parameter = self._parameters_by_index[i]
            if used[i]:
                parameter.grad = reduced.view_as(parameter)
        self._stand_ins.clear()

    def _show_names(self, indices: list[int]) -> str:
        names = [self._names[self._parameters_by_index[i]] for i in indices]
        return ", ".join(names)

    # ---- the agreed order ----------------------------------------------------------------------

    def _adopt_order(self, order: list[int]) -> None:
        gradients = [
            Gradient(p.numel(), str(p.dtype), p.element_size()) for p in self._parameters_by_index
        ]
        self._buckets = self.plan(gradients, order)
        self._bucket_of = {i: n for n, bucket in enumerate(self._buckets) for i in bucket.members}

    def _agree_on_order(self) -> None:
        """Rebuild the plan once, from the order in which rank 0 saw gradients become ready."""
        count = len(self._parameters_by_index)
        observed = list(self._arrivals)
        order = [*observed, *(i for i in reversed(range(count)) if i not in self._arrivals)]
        message = torch.tensor(order, device=self._parameters_by_index[0].device)
        dist.broadcast(message, group=self.process_group, group_src=0)
        self._adopt_order(message.tolist())
        self._order_is_observed = True

    # ---- hooks ---------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        """Hooks hold the wrapper weakly, and leave the parameters when it goes."""
        me = weakref.ref(self)

        def before(i: int):
            def hook(_gradient: Tensor) -> None:
                if (wrapper := me()) is not None:
                    wrapper._before_accumulation(i)

            return hook

        def after(parameter: Parameter) -> None:
            if (wrapper := me()) is not None:
                wrapper.gradient_ready(parameter)

        handles = []
        for i, p in enumerate(self._parameters_by_index):
            handles.append(p.register_hook(before(i)))
            handles.append(p.register_post_accumulate_grad_hook(after))
        weakref.finalize(self, remove_all, handles)


def remove_all(handles: list) -> None:
    for handle in handles:
        handle.remove()


def _full_names(module: nn.Module) -> dict[Parameter, str]:
    """`{parameter: name}`, a tied parameter under all its names."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {parameter: " = ".join(all_names) for parameter, all_names in names.items()}
