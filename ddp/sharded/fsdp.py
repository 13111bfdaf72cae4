"""`fsdp`: parameters are gathered just before a block computes with them, and freed after it.

The problem with `zero2`: gradients and optimizer state are divided, but every rank still holds every
parameter all the time, although it computes with those of one block at a time.

The idea: each rank owns a slice of each block's parameters, one flat buffer long. A block's forward
begins with an all-gather of its buffer and ends by freeing it; its backward does so again. Nothing
waits for these gathers, because the next block's is started when this one begins to compute: the
blocks run in one order, that of the first forward, backward in reverse. A block's gradients are
copied into a flat buffer as they arrive, reduce-scattered when the last one has, and freed; a rank
keeps its slice, which is all that the optimizer needs.

    forward    wait for block k, start k + 1, compute k, free k
    backward   wait for block k, start k - 1, compute k, free k, reduce-scatter gradients of k

At most two blocks are whole at a time, and the gradients of two. What belongs to no block (embedding,
last norm, head) is gathered when the network's forward begins and freed in its backward, each part
when its gradients have arrived.

What remains: three transfers of the parameters' size per step in place of the two of an
all-reduce, and the gather before the first block, which nothing hides.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter

from ddp.base import DataParallel
from ddp.buckets import Bucket, Gradient
from ddp.internals.unused import tensors_in
from ddp.sharded.interface import Sharded
from ddp.sharded.units import Block, GatheredUnit, parameters_by_block
from ddp.torch_compat import (
    at_end_of_backward,
    in_backward,
    own_parameters,
    start_reduce_scatter,
)


class HandBuiltFSDP(Sharded, DataParallel):
    """A network of which every rank holds a slice of each parameter, gradient and optimizer state.

    Outside of a block's computation its parameters are NaN and take no memory;
    `with model.whole_parameters():` makes all of them whole, and `state_dict()` returns whole ones.
    All ranks must call the blocks in the same order, in every forward.

    Args:
        units: the classes of modules that are gathered as one; default: members of each
            `nn.ModuleList`. They must be called as modules, `block(x)`.
        param_dtype: parameters are gathered and compute in this dtype, as with
            `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)` of PyTorch's
            `fully_shard`; the slices that the optimizer changes, and the reduction of gradients,
            keep the dtype that the parameters had. Prefer it to autocast, which makes 16-bit
            copies of the gathered weights and keeps them for backward.

    Under `no_sync()` each rank adds up its own whole gradients, without communication for them.
    With `find_unused_parameters`, all ranks must still call the same blocks.
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
        self._classes = None if units is None else tuple(units)
        self._param_dtype = param_dtype
        super().__init__(module, **options)
        self.reduction.contributors = 1  # a slice holds what was reduced, not a rank's own part
        handles, this = [], weakref.ref(self)
        for block in self.blocks.values():
            enter, leave = (_outside_graphs(partial(f, this, block)) for f in (_enter, _leave))
            handles += [
                block.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                block.module.register_forward_hook(leave),
            ]
        weakref.finalize(self, _remove, handles).atexit = False

    def prepare(self) -> None:
        """Divides the parameters among the ranks."""
        self.blocks: dict[str, Block] = {}
        self.unit_of: dict[Parameter, tuple[GatheredUnit, int]] = {}
        for name, parameters in parameters_by_block(self.module, self._classes).items():
            block = Block(name, self.module.get_submodule(name), self._units(name, parameters))
            self.blocks[name] = block
            for unit in block.units:
                self.unit_of |= {p: (unit, member) for member, p in enumerate(unit.parameters)}
        self.root = self.blocks[""]
        self.units = [u for block in self.blocks.values() for u in block.units if u.is_trainable]
        self.order: list[Block] | None = None
        self._is_whole = self._is_ahead = False
        self._calls: list[Block] = []

    def _units(self, name: str, parameters: dict[Parameter, str]) -> list[GatheredUnit]:
        """Divides a block by dtype; what belongs to none, also by the network's children.

        So the head's gradients leave when backward has only begun.
        """
        groups: dict[tuple, list[Parameter]] = {}
        for p, full_name in parameters.items():
            child = "" if name else full_name.partition(".")[0]
            groups.setdefault((p.dtype, p.requires_grad, child), []).append(p)
        return [
            GatheredUnit(own, self.process_group, self._dtype_of(own[0]))
            for own in groups.values()
        ]

    def _dtype_of(self, parameter: Parameter) -> torch.dtype:
        return (parameter.is_floating_point() and self._param_dtype) or parameter.dtype

    # ---- forward and backward of a block -------------------------------------------------------

    def enter(self, block: Block, inputs: Any) -> None:
        """A block's forward begins: its parameters become whole, and the next block's follow."""
        if self._is_whole:
            return
        if in_backward():  # activation checkpointing computes it once more
            self.gather(block)
            return
        if block is self.root:
            self._begin_calls()
        else:
            self._note_call(block)
        self.gather(block)
        if self.order is not None and len(self._calls) < len(self.order):
            self.start(self.order[len(self._calls)])
        if block is not self.root and torch.is_grad_enabled():
            computed = [x for x in tensors_in(inputs) if x.grad_fn is not None]
            if computed:  # with their gradients, the block's backward is done
                register_multi_grad_hook(computed, lambda _gradients: block.free())

    def leave(self, block: Block, output: Any) -> None:
        """A block's forward ends: its parameters are freed until its backward begins."""
        if self._is_whole or in_backward():
            return
        outputs = [x for x in tensors_in(output) if x.requires_grad]
        if outputs:
            before, self._before = self._before, block
            for x in outputs:
                x.register_hook(lambda _gradient: self.enter_backward(block, before))
        if block is self.root:
            self._end_calls()
        if block is not self.root or not outputs:
            block.free()

    def enter_backward(self, block: Block, before: Block | None) -> None:
        """A block's backward begins; `before` is the one whose backward comes next."""
        at_end_of_backward(self.free)
        self.gather(block)
        if before is not None:
            self.start(before)

    def gather(self, block: Block) -> None:
        self.start(block)
        block.wait()

    def start(self, block: Block) -> None:
        for nbytes in block.start():
            if torch.is_grad_enabled() or in_backward():
                self.count(collectives=1, nbytes=nbytes)

    def free(self) -> None:
        """Frees the parameters of all blocks."""
        self._is_ahead = False
        for block in self.blocks.values():
            block.free()

    # ---- one order of calls --------------------------------------------------------------------

    def _begin_calls(self) -> None:
        if not self._is_ahead:
            self.free()  # values of before the optimizer's step, if there was no backward
        self._is_ahead = False
        self._calls, self._before = [], None
        for unit in self.units:
            unit.drop_cleared()

    def _note_call(self, block: Block) -> None:
        """Collectives match by call order alone: another order would mix parameters of blocks."""
        expected = self.order[len(self._calls) :] if self.order is not None else [block]
        if not expected or expected[0] is not block:
            now = f"{expected[0].name} comes" if expected else "the forward ends"
            raise RuntimeError(
                f"{block.name} is called where in the first forward {now}: all forwards must call "
                "the same units in the same order, as all ranks gather them together; give units= "
                "modules that every forward calls, or use zero2"
            )
        self._calls.append(block)

    def _end_calls(self) -> None:
        names = [block.name for block in self._calls]
        if self.order is None:
            everyone: list[list[str]] = [[]] * self.world_size
            dist.all_gather_object(everyone, names, group=self.process_group)
            if any(theirs != everyone[0] for theirs in everyone):
                raise RuntimeError(
                    f"the ranks called units in different orders, and so gathered different ones "
                    f"together: {'; '.join(', '.join(theirs) for theirs in everyone)}"
                )
            self.order = self._calls
        elif len(names) < len(self.order):
            missing = ", ".join(block.name for block in self.order[len(names) :])
            raise RuntimeError(f"this forward has not called {missing}, as the first one did")

    # ---- gradients -----------------------------------------------------------------------------

    def plan(self, gradients: list[Gradient], order: list[int]) -> list[Bucket]:
        """Returns a bucket for each unit, in the order in which their last gradients come."""
        index = {p: i for i, p in enumerate(p for p in self.module.parameters() if p.requires_grad)}
        place = {i: number for number, i in enumerate(order)}
        buckets = []
        for unit in self.units:
            members = tuple(index[p] for p in unit.parameters)
            nbytes = sum(gradients[i].nbytes for i in members)
            buckets.append(Bucket(members, unit.layout.offsets, unit.layout.numel, nbytes))
        return sorted(buckets, key=lambda bucket: max(place[i] for i in bucket.members))

    def before_accumulation(self, i: int) -> None:
        self.wait_for(self.schedule.bucket_of[i])
        unit, member = self.unit_of[self.gradients.parameters[i]]
        unit.open(member, keep=self.gradients.stand_ins.pop(i, None) is not None)
        super().before_accumulation(i)

    def after_accumulation(self, i: int) -> None:
        super().after_accumulation(i)
        self.collect(i)  # under no_sync() it was not called
        unit, member = self.unit_of[self.gradients.parameters[i]]
        unit.awaited.discard(member)
        if not unit.awaited:
            unit.free()

    @torch.no_grad()
    def collect(self, i: int) -> None:
        unit, member = self.unit_of[self.gradients.parameters[i]]
        unit.take(member, self._reduced_dtype(i))

    def launch(self, bucket: Bucket) -> tuple[dist.Work, Tensor, Tensor]:
        self.wait_for(*self.schedule.in_flight)  # so two buckets of gradients exist at most
        first, absent = bucket.members[0], self.gradients.absent
        unit, _ = self.unit_of[self.gradients.parameters[first]]
        local, missing = unit.take_local(absent, self._reduced_dtype(first))
        for member in missing:
            unit.hold(member, self.gradients.dtypes.of(bucket.members[member]))
            held, unit.parameters[member].grad = unit.parameters[member].grad, None
            self.gradients.stand_ins[bucket.members[member]] = held
        own = local.new_empty(unit.layout.slice_numel)
        self.count(collectives=1, nbytes=local.nbytes)
        work = start_reduce_scatter(own, local, self.reduction.op, self.process_group)
        return work, own, local

    def wait(self, bucket: Bucket, handle: tuple[dist.Work, Tensor, Tensor]) -> None:
        work, own, _ = handle
        work.wait()
        unit, _ = self.unit_of[self.gradients.parameters[bucket.members[0]]]
        if isnan(self.gradients.absent):  # the step is discarded
            unit.gradient = None
        else:
            unit.add_reduced(own)

    def _reduced_dtype(self, i: int) -> torch.dtype:
        unit, _ = self.unit_of[self.gradients.parameters[i]]
        return torch.promote_types(unit.shard.dtype, self.gradients.dtypes.of(i))

    # ---- optimizer and checkpoints -------------------------------------------------------------

    def begin_step(self) -> None:
        self.free()

    def publish(self, unit: GatheredUnit) -> None:
        """Gathers what the next forward needs at once, while the other units are stepped."""
        first = self.order[:1] if self.order else []
        if any(unit in block.units for block in (self.root, *first)):
            unit.start()

    def end_step(self) -> None:
        self._is_ahead = True

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Puts whole parameters in place, of the dtype that the slices have; keeps their changes.

        A collective call. Inside, a forward communicates nothing: one rank alone may evaluate.
        """
        self.free()
        units = [unit for block in self.blocks.values() for unit in block.units]
        whole = {p: w for unit in units for p, w in unit.whole_parameters().items()}
        places = [
            (module, name, p)
            for module in self.module.modules()
            for name, p in own_parameters(module).items()
            if p is not None
        ]
        for module, name, p in places:
            setattr(module, name, whole[p])
        self._is_whole = True
        try:
            yield
            for unit in units:
                unit.take_values(whole)
        finally:
            self._is_whole = False
            for module, name, p in places:
                setattr(module, name, p)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the whole network's state, on every rank; a collective call."""
        with self.whole_parameters():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's slices of a whole state; every rank must give the same one."""
        if assign:
            raise ValueError("load_state_dict: fsdp copies into its slices, give assign=False")
        with self.whole_parameters():
            return super().load_state_dict(state_dict, strict=strict)

    def _state(self, options: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError(
            "an fsdp wrapper cannot be copied or pickled, as a rank has slices of its parameters "
            "only: save model.state_dict(), and load it into a new wrapper"
        )


def _enter(this: weakref.ref, block: Block, _module: nn.Module, args: tuple, kwargs: dict) -> None:
    if (model := this()) is not None:
        model.enter(block, (args, kwargs))


def _leave(this: weakref.ref, block: Block, _module: nn.Module, _args: tuple, output: Any) -> None:
    if (model := this()) is not None:
        model.leave(block, output)


def _outside_graphs(hook: Callable) -> Callable:
    """Keeps `torch.compile`, where it is in use, from tracing a hook."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()
