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
    backward   wait for block k, start k - 1, compute k, free k, reduce-scatter its gradients

At most two blocks are whole at a time, and the gradients of two. The parameters that are in no
block (embedding, last norm, head) are whole from the begin of a forward until their gradients have
arrived. Their gather, and the first block's, start while the optimizer steps the other slices.

What remains: three transfers of the parameters' size in a step, in place of the two halves of an
all-reduce, and the last reduce-scatter, which nothing hides.
"""

from collections.abc import Iterator, Sequence
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
from ddp.sharded.call_order import CallOrder
from ddp.sharded.interface import Sharded
from ddp.sharded.layout import FlatUnit
from ddp.sharded.units import (
    Block,
    BlockHooks,
    GatheredUnit,
    at_last_gradient,
    parameters_by_block,
)
from ddp.sharded.whole import WholeOnDemand
from ddp.torch_compat import at_end_of_backward, copy_, in_backward, reduce_scatter


class HandBuiltFSDP(WholeOnDemand, Sharded, DataParallel):
    """A network of which a rank holds a slice of every parameter, gradient and optimizer state.

    While nothing computes with it, a parameter is NaN and has the memory of one element;
    `model.whole_parameters()` and `model.state_dict()` gather all. Every forward must call the same
    blocks in the same order, on all ranks. With `find_unused_parameters`, what may be unused is a
    part of a block. Under `no_sync()` gradients add up whole, in float32 or wider.

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
        self._classes, self._param_dtype = None if units is None else tuple(units), param_dtype
        super().__init__(module, **options)
        self.reduction.contributors = 1  # `.grad` never holds a reduced gradient, see GatheredUnit
        BlockHooks(self)

    def describe_gradients(self) -> Gradients:
        """Divides the parameters among the ranks, block by block."""
        self.blocks: list[Block] = []
        self.place_of: dict[Parameter, tuple[GatheredUnit, int]] = {}
        for name, names in parameters_by_block(self.module, self._classes).items():
            groups: dict[tuple, list[Parameter]] = {}
            for p, full_name in names.items():  # of no block: by child, so that the head goes early
                child = "" if name else full_name.partition(".")[0]
                groups.setdefault((p.dtype, p.requires_grad, child), []).append(p)
            units = [self._unit(parameters) for parameters in groups.values()]
            self.blocks.append(Block(name, self.module.get_submodule(name), units))
            for unit in units:
                self.place_of |= {p: (unit, member) for member, p in enumerate(unit.parameters)}
        self.root = self.blocks[0]
        self.units = [u for block in self.blocks for u in block.units if u.is_trainable]
        self.order = CallOrder(self.process_group)
        self._is_ahead = False
        self._before: Block | None = None  # whose forward was the last with gradients
        return super().describe_gradients()

    def _unit(self, parameters: list[Parameter]) -> GatheredUnit:
        dtype = parameters[0].dtype
        if self._param_dtype is not None and dtype.is_floating_point:
            dtype = self._param_dtype
        return GatheredUnit(parameters, self.process_group, dtype)

    # ---- parameters ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self._param_dtype
        args = tuple(_cast(x, dtype) for x in args)
        return super().forward(*args, **{key: _cast(x, dtype) for key, x in kwargs.items()})

    def enter(self, block: Block, inputs: Any) -> None:
        """Begins a block's forward: its parameters become whole, the next block's gather starts."""
        if in_backward():  # activation checkpointing computes the block again
            self.gather(block)
            return
        if block is self.root:
            self._begin_forward()
        else:
            self.order.call(block)
        self.gather(block)
        if (next_block := self.order.next_block()) is not None:
            self.start(next_block)
        if block is not self.root and torch.is_grad_enabled():
            computed = [x for x in tensors_in(inputs) if x.grad_fn is not None]
            at_last_gradient(computed, block.free)  # backward has left the block then

    def leave(self, block: Block, output: Any) -> None:
        """Ends a block's forward: its parameters are freed until its backward begins."""
        if in_backward():
            return
        outputs = [x for x in tensors_in(output) if x.requires_grad]
        if outputs:
            before, self._before = self._before, block
            for x in outputs:
                x.register_hook(lambda _gradient: self.enter_backward(block, before))
        if block is self.root:
            self.order.end()
        if block is not self.root or not outputs:
            block.free()

    def enter_backward(self, block: Block, before: Block | None) -> None:
        """Begins a block's backward; that of `before` comes next."""
        at_end_of_backward(self.free)
        self.gather(block)
        if before is not None:
            self.start(before)

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

    def _begin_forward(self) -> None:
        if not self._is_ahead:
            self.free()  # of a forward without a backward, or a backward that failed
        self._is_ahead, self._before = False, None
        self.order.begin()
        for unit in self.units:
            if all(p.grad is None for p in unit.parameters):
                unit.gradient = None

    # ---- gradients -----------------------------------------------------------------------------

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        """Returns a bucket for each unit, in the order in which the last gradients of each come."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        index = {p: i for i, p in enumerate(trainable)}
        position = {i: place for place, i in enumerate(order)}
        buckets = []
        for unit in self.units:
            members = tuple(index[p] for p in unit.parameters)
            nbytes = sum(gradients[i].numel for i in members) * self._dtype_of(unit).itemsize
            buckets.append(Bucket(members, unit.layout.offsets, unit.layout.numel, nbytes))
        return sorted(buckets, key=lambda bucket: max(position[i] for i in bucket.members))

    def before_accumulation(self, i: int) -> None:
        self.wait_for(self.schedule.bucket_of[i])
        self._take_stand_in_away(i)
        super().before_accumulation(i)

    def after_accumulation(self, i: int) -> None:
        super().after_accumulation(i)
        unit, member = self.place_of[self.gradients.parameters[i]]
        unit.awaited.discard(member)
        if not unit.awaited:  # backward uses a parameter no more once its gradient is there
            unit.free()

    def launch(self, bucket: Bucket) -> tuple[dist.Work, Tensor, Tensor]:
        self.wait_for(*self.schedule.in_flight)  # one on the wire at a time bounds the memory
        for i in bucket.members:
            self._take_stand_in_away(i)
        unit, _ = self.place_of[self.gradients.parameters[bucket.members[0]]]
        flat = unit.shard.new_empty(unit.layout.numel, dtype=self._dtype_of(unit))
        copy_(unit.layout.views(flat), [self.gradient(i) for i in bucket.members])
        for member, i in enumerate(bucket.members):
            if i in self.gradients.stand_ins:  # no gradient on this rank
                self.gradients.stand_ins[i] = unit.stand_in(member)
            else:
                unit.parameters[member].grad = unit.stand_in(member)
        own = flat.new_empty(unit.layout.slice_numel)
        self.count(collectives=1, nbytes=flat.nbytes)
        op = self.reduction.op if self._averages else dist.ReduceOp.SUM
        return reduce_scatter(own, flat, op, self.process_group), own, flat

    def wait(self, bucket: Bucket, handle: tuple[dist.Work, Tensor, Tensor]) -> None:
        work, own, _ = handle
        work.wait()
        if self.reduce == "mean" and not self._averages:
            own.div_(self.world_size)
        self.place_of[self.gradients.parameters[bucket.members[0]]][0].add_reduced(own)

    def _take_stand_in_away(self, i: int) -> None:
        parameter = self.gradients.parameters[i]
        unit, member = self.place_of[parameter]
        if unit.take_away(self.gradients.stand_ins.get(i, parameter.grad), member):
            self.gradients.stand_ins.pop(i, None)
            parameter.grad = None

    def _dtype_of(self, unit: FlatUnit) -> torch.dtype:
        """Returns the dtype in which a unit's gradients are reduced."""
        wide = self.gradients.dtypes.least or unit.shard.dtype
        return torch.promote_types(wide, unit.shard.dtype)

    @property
    def _averages(self) -> bool:
        """Returns whether the backend's reduce-scatter can average. That of gloo only sums."""
        return dist.get_backend(self.process_group) == dist.Backend.NCCL

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._param_dtype is not None and self.gradient_dtype is None:
            self.gradient_dtype = torch.float32  # of what adds up, in place of `param_dtype`
        with super().no_sync():
            yield

    # ---- the step, as ShardedOptimizer calls it ------------------------------------------------

    def begin_step(self) -> None:
        self.free()

    def publish(self, unit: FlatUnit) -> None:
        """Starts to gather what the next forward needs first, while other slices are stepped."""
        first = [self.root, *(self.order.blocks or [])[:1]]
        if isinstance(unit, GatheredUnit) and any(unit in block.units for block in first):
            self.count(collectives=1, nbytes=unit.start())

    def end_step(self) -> None:
        self._is_ahead = True


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    floats = dtype is not None and isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if floats else x
