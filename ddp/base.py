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

The agreed order is the reverse of registration in the first step and then, once, the order that
rank 0 has observed. rounds.py keeps the books of what is ready, launched and reduced, hooks.py
says how autograd reaches this class, unused.py what happens to a parameter without a gradient,
buffers.py how buffers follow rank 0, watch.py what is said when parameters change under it,
buckets.py how a plan is made, arithmetic.py whether means or sums travel and in which type.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.arithmetic import Arithmetic, give_dtype
from ddp.buckets import Bucket, Gradient, one_bucket_each
from ddp.buffers import Buffers
from ddp.checks import broadcast_from_rank_0, check_same_model, full_names
from ddp.copies import Copyable
from ddp.hooks import register_hooks
from ddp.ownership import activate, enter, shared_with_another
from ddp.rounds import Launch, Rounds
from ddp.unused import agree_on_use, parameters_reached_by
from ddp.watch import Watch


class DataParallel(Rounds, Arithmetic, Copyable, nn.Module):
    """A network whose gradients are the mean (or the sum) of those of all ranks.

    Args:
        module: the network; its parameters and buffers are overwritten with rank 0's.
        reduce: `"mean"` for ordinary training, `"sum"` for private training, where the divisor
            is a public constant.
        process_group: the ranks that hold replicas; default all.
        find_unused_parameters: accept parameters that take no part in a backward on some or all
            ranks. A rank that did not use a parameter contributes zero; one that nobody used
            keeps its `.grad`.

    Raises:
        RuntimeError: if no process group is initialised, the module has nothing to train or a
            parameter without a shape, or a wrapper of another network reduces one of them.
        ValueError: if the ranks hold different models (on every rank), or an unknown reduction.
    """

    options: ClassVar[tuple[str, ...]] = ("reduce", "process_group", "find_unused_parameters")
    """What `wrap` accepts for this variant."""

    launches_in_backward: ClassVar[bool] = True
    """False for a variant that launches everything in `finish_gradient_synchronization`."""

    gradients_come_by_hand: bool = False
    """Set by a private engine: autograd accumulates nothing, all comes through `gradient_ready`."""

    _is_active: bool = True
    """False while another wrapper of the same network is in use: see ownership.py."""

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
        assert self.process_group is not None  # there is one, as is_initialized() says
        self.world_size = dist.get_world_size(self.process_group)
        self.find_unused_parameters = find_unused_parameters

        if not self._is_copy:
            check_same_model(module, self.process_group, shared_with_another(module))
            broadcast_from_rank_0([*module.parameters(), *module.buffers()], self.process_group)
        activate(self, abandon=True)

        self._parameters_by_index = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters_by_index and not self._is_copy:
            raise RuntimeError("no parameter requires a gradient: there is nothing to synchronise")
        self._own_dtypes = [p.grad_dtype for p in self._parameters_by_index]
        self._given_dtypes = {}
        self._index = {p: i for i, p in enumerate(self._parameters_by_index)}
        self._names = full_names(module)
        self._watch = Watch(self._parameters_by_index, self._names)
        self._buffers_of_module = Buffers(module, self.process_group)
        self._synchronizing = True
        self._order_is_observed = False
        self._reduced: set[int] = set()  # `.grad` holds the same reduced value on all ranks
        self._stats = {"collectives": 0, "bytes": 0, "buckets": 0}
        self._launches: list[tuple[int, Bucket]] = []
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

    def collect(self, i: int) -> None:
        """Called when gradient `i` is ready, before its bucket may be launched."""

    def before_forward(self) -> None:
        """Called before each synchronising forward, when no reduction is under way."""

    # ---- what a user calls ---------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self._prepare_forward()
        elif torch.is_grad_enabled():
            self._prepare_forward_in_eval()
        output = self._watch.call(self.module, args, kwargs)
        if trains and self.find_unused_parameters and self._awaits_backward:
            self._reached |= {
                self._index[p] for p in parameters_reached_by(output) if p in self._index
            }
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside have local backwards; the next one outside reduces the whole sum.

        As in PyTorch's DDP, the forward decides, wherever the backward is called. A backward that
        belongs to a forward inside and to another outside reduces. Without a forward, as for
        `gradient_ready` by hand, the call itself decides.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @torch.no_grad()
    def before_gradient(self, parameter: Parameter) -> None:
        """`parameter.grad` is about to be added to.

        Afterwards no collective is writing to it, it is of `gradient_dtype`, and what it holds is
        this rank's part: nothing, what was accumulated so far, or its share of what is reduced.
        Autograd's hook calls this before it accumulates; a private engine calls it before it adds
        a further clipped sum. Under `no_sync` too.

        Raises:
            ValueError: if the parameter is not one of the module's trainable ones.
        """
        i = self._index_of(parameter, "before_gradient")
        if not self._is_active:
            activate(self)
        if self._bucket_of[i] in self._in_flight:
            self._wait_for(self._bucket_of[i])
        self._conform(i)
        self._take_back_share(i)

    @torch.no_grad()
    def gradient_ready(self, parameter: Parameter) -> None:
        """`parameter.grad` is final for this backward and may be reduced.

        Autograd's hook calls this in ordinary training; a private engine calls it when a clipped
        sum is final, for all parameters before its next forward: that forward takes what is
        incomplete for a step that failed, and discards it.

        Raises:
            ValueError: if the parameter is not one of the module's trainable ones.
            RuntimeError: for a gradient that is missing, sparse or not of `gradient_dtype`.
        """
        i = self._index_of(parameter, "gradient_ready")
        if not self._is_active:
            activate(self)
        if parameter.grad is None:
            raise RuntimeError(f"gradient_ready: {self._names[parameter]} has no gradient")
        if parameter.grad.layout != torch.strided:
            raise RuntimeError(
                f"{self._names[parameter]} has a sparse gradient, which no variant reduces: "
                "build its embedding with sparse=False"
            )
        self._raise_if_rounded(i)
        self._settle(i)
        self._reduced.discard(i)
        self._used.add(i)
        if self._this_backward_reduces():
            self._arrive(i)

    @torch.no_grad()
    def gradient_absent(self, parameter: Parameter) -> None:
        """Autograd's node of `parameter` has run, and there is no gradient: it counts as zero.

        With `find_unused_parameters` it counts as unused on this rank.
        """
        i = self._index[parameter]
        if self._this_backward_reduces():
            if not self.find_unused_parameters:
                self._used.add(i)
            self._arrive(i)

    def _arrive(self, i: int) -> None:
        self._watch.gradient_arrived(self._parameters_by_index[i])
        self._unfinished = True
        self._by_hand |= not self._in_backward
        everything_is_sent = self._launched == len(self._buckets)
        if everything_is_sent and not self.find_unused_parameters:
            self._wait_for_all()
            self._begin_round()  # a second backward before finish
        self._arrivals[i] = self._arrivals.get(i, 0) + 1
        self._ready.add(i)
        self.collect(i)
        if self.launches_in_backward:
            self._mark_unreached_ready()
            self._launch_complete_buckets()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return when every `.grad` holds the reduced gradient. A second call does nothing.

        Raises:
            RuntimeError: naming the parameters, if some got no gradient and
                `find_unused_parameters` is off, or naming a parameter that was changed before its
                gradient was reduced. The step is then discarded.
        """
        if not self._unfinished:
            return
        self._raise_if_changed()
        if not self.find_unused_parameters:
            if self._is_frozen():
                self._begin_step()
                return
            self._raise_if_incomplete()
        self._finish_round()
        used, anything_late = self._used, bool(self._used - self._reduced)
        if self.find_unused_parameters:
            used, anything_late = agree_on_use(self, used, anything_late)
        self._adopt_stand_ins(used)
        if anything_late:  # a gradient has grown since it was sent
            self._begin_round()
            self._finish_round()
            self._adopt_stand_ins(used)
        self._restore_strides()
        self._stats = dict(self._counters, buckets=len(self._buckets))
        self._launches = self._log
        if not self._order_is_observed:
            self._agree_on_order()
        self._begin_step()

    def stats(self) -> dict[str, int]:
        """Of the last finished step, on this rank.

        `collectives` started for gradients, `bytes` of gradients handed to them (a ring moves
        2(W-1)/W times as many over each link), and `buckets` in the plan.
        """
        return dict(self._stats)

    def launches(self) -> list[Launch]:
        """Of the last finished step, on this rank: what left when, in order."""
        return [
            Launch(ready, bucket.nbytes, tuple(self._name(i) for i in bucket.members))
            for ready, bucket in self._launches
        ]

    # ---- helpers for variants ------------------------------------------------------------------

    def gradient(self, i: int) -> Tensor:
        """What this rank adds to parameter `i`: its contiguous `.grad`, or zeros if it has none.

        In a step that is being discarded NaN stands for the missing gradient, so that a rank that
        does not discard it sees at once that it has no mean.
        """
        parameter = self._parameters_by_index[i]
        if i in self._stand_ins:
            return self._stand_ins[i]
        if parameter.grad is None:
            absent = parameter.new_full(parameter.shape, self._absent, dtype=self.dtype_of(i))
            return self.stand_in(i, absent)
        if not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()  # ranks may hold different strides
        return parameter.grad

    def stand_in(self, i: int, tensor: Tensor) -> Tensor:
        """Reduce `tensor` for the unused parameter `i`; if another rank used it, it is `.grad`."""
        self._stand_ins[i] = tensor
        return tensor

    def count(self, collectives: int, nbytes: int) -> None:
        self._counters["collectives"] += collectives
        self._counters["bytes"] += nbytes

    # ---- between steps --------------------------------------------------------------------------

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self._watch.accept_changes()
        return result

    def deactivate(self) -> None:
        """Another wrapper of this network takes over: forget an unfinished step."""
        self._wait_for_all()
        self._begin_step()
        while self._given_dtypes:
            give_dtype(*self._given_dtypes.popitem())
        self._is_active = False

    def _prepare_forward(self) -> None:
        self._watch.raise_if_replaced(self.module)
        if not self._is_active:
            activate(self)
        self._raise_if_changed()
        self._conform_all()
        if self._in_backward:  # the last one failed
            self._discard_step()
        if self._synchronizing:
            self._prepare_step()
            self._awaits_backward = True
        self._backward_reduces = self._awaits_backward

    def _prepare_forward_in_eval(self) -> None:
        """A network may be trained in eval mode. One rank alone may call it: no communication."""
        if not self._in_backward and (complaint := self._watch.complaint()):
            raise RuntimeError(complaint)
        self._backward_reduces = self._synchronizing or self._awaits_backward

    def _this_backward_reduces(self) -> bool:
        if not self._in_backward or self._backward_reduces is None:
            return self._synchronizing
        self._awaits_backward = False
        return self._backward_reduces

    def _raise_if_changed(self) -> None:
        """An optimizer has stepped with gradients that were not reduced."""
        if not self._in_backward and (complaint := self._watch.complaint()):
            self._discard_step()
            raise RuntimeError(complaint)

    def _prepare_step(self) -> None:
        """All ranks must have issued the same collectives before the buffers' broadcast."""
        if self.find_unused_parameters and not self._by_hand:
            # Others may have launched what this rank has not even begun.
            if self._unfinished and self._missing() and self.launches_in_backward:
                self._launch_complete_buckets(everything=True)
        else:
            self._discard_partial_step()
        self._wait_for_all()
        self.before_forward()
        self._buffers_of_module.broadcast()
        self._unfinished = True

    def _discard_partial_step(self) -> None:
        if self._arrivals and (missing := self._missing()):
            warnings.warn(
                f"a step is discarded, gradients included: {self._show_names(missing)} got none "
                "in its backward; if that is meant, pass find_unused_parameters=True",
                stacklevel=4,
            )
            self._discard_step()

    def _discard_step(self) -> None:
        """Forget a step that was left half-way, and its gradients: some are reduced, some not.

        Ranks may have been stopped in different places, so each completes the round. That works
        if every rank was stopped inside its backward; where one was not, it sees NaN.
        """
        self._absent = torch.nan
        for parameter in self._parameters_by_index:
            parameter.grad = None
        self._stand_ins.clear()
        if self._arrivals and self.launches_in_backward:
            self._launch_complete_buckets(everything=True)
        self._wait_for_all()
        self._begin_step()

    # ---- the agreed order ----------------------------------------------------------------------

    def _adopt_order(self, order: list[int]) -> None:
        gradients = [
            Gradient(p.numel(), str(self.dtype_of(i)), self.dtype_of(i).itemsize)
            for i, p in enumerate(self._parameters_by_index)
        ]
        self._order = order
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

    def _index_of(self, parameter: Parameter, caller: str) -> int:
        if parameter not in self._index:
            raise ValueError(f"{caller}: not a trainable parameter of the wrapped module")
        return self._index[parameter]

    def _register_hooks(self) -> None:
        enter(self, register_hooks(self, self._parameters_by_index))
