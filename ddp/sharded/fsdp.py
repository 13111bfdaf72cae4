"""`fsdp`: parameters are gathered just before a block computes with them, and freed after it.

The problem with `zero2`: gradients and optimizer state are divided, but every rank holds every
parameter all the time, although it computes with those of one block at a time.

The idea (ZeRO stage 3, https://arxiv.org/abs/1910.02054; Zhao et al. 2023, arXiv:2304.11277): a
rank owns a slice of each block's parameters. A block's forward begins with an all-gather of them
and ends by freeing them; its backward does so again. The blocks run in one order, that of the first
forward and its reverse, so the next one's gather runs while this one computes. A block's gradients
are reduce-scattered once the last of them is there, and a rank keeps its slice: all that the
optimizer needs.

    forward    wait for block k, start k + 1, compute k, free k
    backward   free k + 1, wait for block k, start k - 1, compute k, reduce-scatter its gradients

At most two blocks are whole at a time, and the gradients of two. The parameters that are in no
block (embedding, last norm, head) are whole from the begin of a forward until their gradients have
arrived. Their gather, and the first block's, start while the optimizer steps the other slices.

What remains: three transfers of the parameters' size in a step, in place of the two halves of an
all-reduce, and the last reduce-scatter, which nothing hides.

Read `start`, `wait`, `free` and `add_reduced` of `GatheredUnit` in units.py first, then this class.
Skip at first what is there for steps that fail, or that go another way: call_order.py, `may_launch`
and `_is_next`, the stand-ins for gradients in units.py, whole.py.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.base import DataParallel
from ddp.buckets import Bucket, Gradient
from ddp.internals.gradients import Gradients
from ddp.internals.unused import tensors_in
from ddp.sharded.call_order import CallOrder, WayBack
from ddp.sharded.interface import Sharded
from ddp.sharded.layout import FlatUnit
from ddp.sharded.optimizer import agree
from ddp.sharded.torch_compat import in_transform
from ddp.sharded.units import Block, GatheredUnit, blocks_of, cast, wait_for
from ddp.sharded.whole import WholeOnDemand
from ddp.torch_compat import (
    at_end_of_backward,
    in_backward,
    number_of_backward,
    without_torch_functions,
)

CREATES_GRAPH = (
    "create_graph=True through a block of fsdp, whose parameters are freed before a second "
    'derivative needs them: use wrap("zero2", module)'
)
IN_TRANSFORM = (
    "a forward of a network that fsdp has divided, inside of a transform of torch.func, where it "
    "cannot gather parameters: call the transform inside of `with model.whole_parameters():`"
)
INSIDE = (
    "{what} inside of whole_parameters(), where other tensors are in the network: take them from "
    "model.parameters() inside of it"
)
IN_BACKWARD = (
    "{what} in a backward, where fsdp has freed the parameter: call it behind "
    "finish_gradient_synchronization()"
)
ON_ONE_RANK = (
    "outside of its block's forward each use of a parameter is a call of all ranks: to look at "
    "parameters on one rank, let all enter `with model.whole_parameters():`"
)


class HandBuiltFSDP(WholeOnDemand, Sharded, DataParallel):
    """A network of which a rank holds a slice of every parameter, gradient and optimizer state.

    Outside of its block's forward and backward, a parameter has the memory of one element, and
    functions that read or write its values are collective calls (whole.py);
    `model.whole_parameters()` and `model.state_dict()` gather all at once. Every forward must call
    the same blocks in the same order, on all ranks. With `find_unused_parameters`, what may be
    unused is a part of a block, or what is in no block. Under `no_sync()` gradients add up whole,
    in float32 or wider.

    Args:
        units: the classes of modules that are blocks; default: each member of an `nn.ModuleList`.
            A block must be called as a module, `block(x)`, with and returning tensors or
            containers of them.
        param_dtype: parameters are gathered and compute in this dtype, as with
            `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)` of PyTorch's
            `fully_shard`; slices and reductions keep the dtype that the parameters had. Under
            `torch.autocast` in its place, the 16-bit copies of all weights are kept for backward.
    """

    options = (*DataParallel.options, "units", "param_dtype")

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Sequence[type[nn.Module]] | None = None,
        param_dtype: torch.dtype | None = None,
        **options: Any,
    ):
        if param_dtype is not None and not param_dtype.is_floating_point:
            raise ValueError(f"param_dtype: {param_dtype} is not a floating type")
        self._classes, self._param_dtype = units, param_dtype
        super().__init__(module, **options)
        self.reduction.contributors = 1  # `.grad` never holds a reduced gradient, see GatheredUnit
        for block in self.blocks:
            block.call(self.call, self.leave)
            for unit in block.units:
                unit.before_use = _weak(self.before_use)

    def describe_gradients(self) -> Gradients:
        """Divides the parameters among the ranks, block by block."""
        self.blocks = blocks_of(self.module, self._classes, self.process_group, self._param_dtype)
        self.root = self.blocks[0]
        units = [unit for block in self.blocks for unit in block.units if unit.is_trainable]
        self.units: list[FlatUnit] = [*units]
        self.order = CallOrder(self.process_group)
        self._new_way = self.way_back = WayBack()  # of the last forward; of the last backward
        self._is_ahead = False  # the optimizer has started the gathers of the next forward
        self._backward = -1  # the number of the one that runs, not of those inside of it
        self._has_agreed = False
        gradients = super().describe_gradients()
        place_of = {id(p): (u, member) for u in units for member, p in enumerate(u.parameters)}
        self.places = [place_of[id(p)] for p in gradients.parameters]
        return gradients

    # ---- parameters ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_whole:
            return self.module(*args, **kwargs)
        if self.step.has_failed():
            self.step.discard(self)
        self._has_agreed = False  # on this forward, all ranks
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._end_calls()  # also of a forward that has failed

    def before_forward(self) -> None:
        """Agrees with the others before buffers are broadcast, which only such a forward does."""
        with without_torch_functions():  # which would take 10 times as long
            super().before_forward()
        self._agree_on_forward("a forward")

    def finish_gradient_synchronization(self) -> None:
        with without_torch_functions():
            super().finish_gradient_synchronization()

    def call(self, block: Block, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Begins a block's forward; returns the network's arguments in `param_dtype`."""
        self.enter(block)
        dtype = self._param_dtype
        if dtype is None or block is not self.root or self.is_whole:
            return None
        return tuple(cast(x, dtype) for x in args), {k: cast(x, dtype) for k, x in kwargs.items()}

    def enter(self, block: Block) -> None:
        """Begins a block's forward: its parameters become whole, the next block's gather starts."""
        if self.is_whole:
            return
        if in_backward():  # activation checkpointing computes the block again
            self.gather(block)
            return
        if block is self.root:
            self._begin_forward()
        elif not self.root.computes:
            return  # called by itself: its functions gather what they use
        else:
            self.order.call(block)
        block.computes = True
        self.gather(block)
        if (next_block := self.order.next_block()) is not None:
            self.start(next_block)

    def leave(self, block: Block, output: Any) -> None:
        """Ends a block's forward: its parameters are freed until its backward begins."""
        if not block.computes or in_backward():
            return
        block.computes = False
        outputs = [x for x in tensors_in(output) if x.requires_grad]
        if outputs:
            way = self._new_way
            place = way.add(block)
            for x in outputs:
                x.register_hook(lambda _gradient: self._enter_backward(way, place))
        if block is self.root:
            self.order.end()
            self.way_back = way if outputs else self.way_back
        if block is not self.root or not outputs:
            block.free()

    def _enter_backward(self, way: WayBack, place: int) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(CREATES_GRAPH)
        self.enter_backward(way, place)

    @torch.no_grad()
    def enter_backward(self, way: WayBack, place: int) -> None:
        """Begins the backward of the block at a place of the way back."""
        at_end_of_backward(self._end_backward)
        self._backward = number_of_backward()
        way.begin()
        self.way_back = way
        while way.ahead > place:  # several, if the loss does not depend on some of them
            way.go_on(self.start)
            self.launch_buckets()
        for unit in way.blocks[place].units:
            if unit.kept:
                unit.forget_cleared(self.gradients)
        self.gather(way.blocks[place])

    def gather(self, block: Block) -> None:
        self.start(block)
        block.wait()

    def start(self, block: Block) -> None:
        for nbytes in block.start():
            self.count(collectives=1, nbytes=nbytes)

    def free(self) -> None:
        for block in self.blocks:
            block.free()
        self._is_ahead = False

    def before_use(self, what: str) -> None:
        """Called before a function gathers whole values of stand-ins, on all ranks."""
        if self.is_whole:
            raise RuntimeError(INSIDE.format(what=what))
        if in_backward():  # where ranks may have come to different places
            raise RuntimeError(IN_BACKWARD.format(what=what))
        try:
            agree(lambda mine: self.exchange(mine, wait_for), what)
        except RuntimeError as error:
            error.add_note(ON_ONE_RANK)
            raise

    def _end_calls(self) -> None:
        for block in self.blocks:
            block.computes = False

    def _agree_on_forward(self, act: str) -> None:
        """Returns once all ranks begin such a forward; others may be in a step or evaluate."""
        if in_transform():
            raise RuntimeError(IN_TRANSFORM)
        self._end_calls()
        self.way_back.complete(self.start)
        if not self._is_ahead:
            self.free()
        agree(lambda mine: self.exchange(mine, wait_for), act)
        self._has_agreed = True

    def _begin_forward(self) -> None:
        if not self._has_agreed:
            how = "in eval mode" if torch.is_grad_enabled() else "without gradients"
            is_local = self.training and torch.is_grad_enabled()
            self._agree_on_forward(f"a forward {'under no_sync()' if is_local else how}")
        self._has_agreed, self._is_ahead, self._new_way = False, False, WayBack()
        self.order.begin()

    def _end_backward(self) -> None:
        self.way_back.is_over = True
        self.free()

    # ---- gradients -----------------------------------------------------------------------------

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        """Returns a bucket for each unit, in the order in which the last gradients of each come."""
        units = dict.fromkeys(unit for unit, _ in self.places)
        self.unit_of = {unit.bucket(self.gradients): unit for unit in units}
        place = {i: place for place, i in enumerate(order)}
        return sorted(self.unit_of, key=lambda bucket: max(place[i] for i in bucket.members))

    def launch_buckets(self, everything: bool = False, most: int | None = None) -> None:
        """Launches a bucket once the gathers have started that come before it on every rank.

        A bucket waits until backward has entered its block; one of no block, the next one's.
        """
        if everything:
            super().launch_buckets(everything)
        for bucket in self.schedule.buckets[self.schedule.launched :]:
            if not self.schedule.ready.issuperset(bucket.members):
                return
            if in_backward() and not self._is_next():
                return
            super().launch_buckets(most=1)

    def _is_next(self) -> bool:
        names = (self.unit_of[b].name for b in self.schedule.buckets[self.schedule.launched :])
        return self.way_back.has_entered(next(filter(None, names), ""))

    def before_accumulation(self, i: int) -> None:
        self.wait_for(self.schedule.bucket_of[i])
        unit, member = self.places[i]
        unit.take_stand_in_away(self.gradients, i, member)
        super().before_accumulation(i)

    def after_accumulation(self, i: int) -> None:
        unit, member = self.places[i]
        if member in unit.kept:
            unit.put_stand_in_back(self.gradients, i, member)
        super().after_accumulation(i)
        unit.awaited.discard(member)
        # Backward uses a parameter no more once its gradient is there, but one in another
        # backward, as reentrant checkpointing runs it, has the gradient of one segment alone.
        if not unit.awaited and number_of_backward() == self._backward:
            unit.free()

    def launch(self, bucket: Bucket) -> tuple[dist.Work, Tensor, Tensor]:
        while not self._is_next():  # backward has failed, or not begun
            self.way_back.go_on(self.start)
        self.wait_for(*self.schedule.in_flight)  # one on the wire at a time bounds the memory
        unit = self.unit_of[bucket]
        flat = unit.collect(self.gradients, bucket.members)
        own = flat.new_empty(unit.layout.slice_numel)
        self.count(collectives=1, nbytes=flat.nbytes)
        return self.reduce_slices(own, flat), own, flat

    def wait(self, bucket: Bucket, handle: tuple[dist.Work, Tensor, Tensor]) -> None:
        work, own, _ = handle
        wait_for(work, "reduction", self.unit_of[bucket].name)
        self.average(own)
        self.unit_of[bucket].add_reduced(own)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._param_dtype is not None and self.gradient_dtype is None:
            self.gradient_dtype = torch.float32  # of what adds up, in place of `param_dtype`
        with super().no_sync():
            yield

    # ---- the step, as ShardedOptimizer calls it ------------------------------------------------

    def begin_step(self, units: list[FlatUnit]) -> None:
        if not self._is_ahead:
            self.free()
        for unit in units:  # what another optimizer has gathered remains
            if isinstance(unit, GatheredUnit):
                unit.free()

    def publish(self, unit: FlatUnit) -> None:
        """Starts to gather what the next forward needs first, while other slices are stepped."""
        first = [self.root, *(self.order.blocks or [])[:1]]
        if isinstance(unit, GatheredUnit) and any(unit in block.units for block in first):
            self.count(collectives=1, nbytes=unit.start())

    def end_step(self, parameters: list[Parameter]) -> None:
        self._is_ahead = True


def _weak(method: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that calls a wrapper's method as long as there is the wrapper."""
    weak = weakref.WeakMethod(method)

    def call(what: str) -> None:
        if (alive := weak()) is not None:
            alive(what)

    return call
