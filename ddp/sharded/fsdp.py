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

Read `start`, `wait` and `free` of `GatheredUnit` in units.py first, then this class. What is there
for steps that fail, or go another way, is in internals/: skip it at first.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp.base import DataParallel
from ddp.sharded.internals.blocks import Block, WayBack
from ddp.sharded.internals.whole import DividedInterface
from ddp.sharded.units import GatheredUnit
from ddp.torch_compat import number_of_backward


class HandBuiltFSDP(DividedInterface):
    """A network of which a rank holds a slice of every parameter, gradient and optimizer state.

    Outside of its block's forward and backward, a parameter has no values (internals/stand_in.py);
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
    frees_gradients = True

    def enter(self, block: Block) -> None:
        """Begins a block's forward: its parameters become whole, the next block's gather starts."""
        block.mark(computes=True)
        self.gather(block)
        if (next_block := self.order.next_block()) is not None:
            self.start(next_block.units)

    def leave(self, block: Block, outputs: list[Tensor]) -> None:
        """Ends a block's forward: its parameters are freed until the backward of its outputs."""
        block.mark(computes=False)
        if outputs:
            way = self.order.way
            place = way.add(block)
            for x in outputs:
                x.register_hook(lambda _gradient: self.enter_backward(way, place))
        if block is not self.root or not outputs:
            block.free()

    def enter_backward(self, way: WayBack, place: int) -> None:
        """Begins the backward of the block at a place of the way back."""
        self.order.enter_backward(way, self.free)
        while way.ahead > place:  # several, if the loss does not depend on some of them
            way.go_on(self.start)
            self.launch_buckets()
        self.gather(way.blocks[place])

    def gather(self, block: Block) -> None:
        self.start(block.units)
        for unit in block.units:
            unit.wait()

    def start(self, units: Sequence[GatheredUnit]) -> None:
        for unit in units:
            if not unit.has_memory:
                unit.start()
                self.step.record.count(unit.values.nbytes)

    def launch(self, unit: Any) -> tuple[dist.Work, Tensor, Tensor]:
        self.catch_up()
        self.wait_for(*self.schedule.in_flight)  # one on the wire at a time bounds the memory
        # Backward needs a unit no more once its gradients are there. Those that come in another
        # backward, as reentrant checkpointing runs it, are of one segment alone.
        are_there = self.schedule.arrivals.keys() >= set(unit.members)
        if are_there and number_of_backward() == self.order.backward:
            unit.free()
        return super().launch(unit)

    def begin_step(self, units: list[Any]) -> None:
        if not self.order.is_ahead:
            self.free()
        for unit in units:  # what another optimizer has gathered remains
            unit.free()

    def publish(self, unit: Any) -> None:
        """Starts to gather what the next forward needs first, while other slices are stepped."""
        for block in (self.root, *(self.order.blocks or [])[:1]):
            if unit in block.units:
                self.start([unit])

    def end_step(self, parameters: list[Parameter]) -> None:
        self.order.is_ahead = True
