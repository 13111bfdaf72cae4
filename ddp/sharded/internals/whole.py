"""Follows calls of blocks, gathers whole parameters and agrees on failures, for `fsdp`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.internals.unused import tensors_in
from ddp.sharded.base import Sharded
from ddp.sharded.internals.agreement import NOT_THE_SAME, agree, noted
from ddp.sharded.internals.blocks import Block, CallOrder, Start, blocks_of, call_around, cast
from ddp.sharded.internals.views import gather, keep
from ddp.sharded.layout import FlatUnit
from ddp.torch_compat import in_backward, own, without_torch_functions

NO_TENSOR = (
    "fsdp finds no tensor in the {kind} that {name} returns: return a tensor, or tuples, lists, "
    "dicts or dataclasses of them"
)


class DividedInterface(Sharded):
    """A network whose parameters are whole in some blocks at a time.

    Attributes:
        blocks: all of them.
        root: the first one, the network itself, which has what is in no other.
        order: the order in which they are called.
        is_whole: inside of `whole_parameters`, where a forward communicates nothing.
    """

    is_whole: bool = False

    start: Start
    enter: Callable[[Block], None]
    leave: Callable[[Block, list[Tensor]], None]
    gather: Callable[[Block], None]  # of fsdp.py

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
        for block in self.blocks:
            call_around(block, self.call, self.end_call)

    def divide(self) -> list[FlatUnit]:
        """Divides the parameters among the ranks, block by block."""
        self.blocks = blocks_of(self.module, self._classes, self.process_group, self._param_dtype)
        self.root, self.order = self.blocks[0], CallOrder()
        units = [unit for block in self.blocks for unit in block.units]
        return [unit for unit in units if unit.parameters[0].requires_grad]

    def free(self) -> None:
        """Frees the parameters of all blocks."""
        for block in self.blocks:
            block.free()
        self.order.is_ahead = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_whole:
            return self.module(*args, **kwargs)
        if self.step.has_failed():
            self.step.discard(self)
        self.order.has_agreed = False  # on this forward, all ranks
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.end_calls()  # also of a forward that has failed

    def before_forward(self) -> None:
        """Agrees with the others before buffers are broadcast, which only such a forward does."""
        super().before_forward()
        self.agree_on_forward("a forward")

    def begin_forward(self) -> None:
        """Begins a forward of the whole network, also one without gradients or in eval mode."""
        if not self.order.has_agreed:
            how = "in eval mode" if torch.is_grad_enabled() else "without gradients"
            is_local = self.training and torch.is_grad_enabled()
            self.agree_on_forward(f"a forward {'under no_sync()' if is_local else how}")
        self.order.begin()

    def call(self, block: Block, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Begins a block's forward; returns the network's arguments in `param_dtype`."""
        if self.is_whole:
            return None
        if in_backward():  # activation checkpointing computes the block again
            self.gather(block)
        elif block is self.root:
            self.begin_forward()
            self.enter(block)
        elif self.root.computes:  # else it is called by itself, and nothing gathers what it uses
            self.order.call(block, self.agree)
            self.enter(block)
        for unit in block.units:
            unit.was_called = True
        dtype = self._param_dtype
        if dtype is None or block is not self.root:
            return None
        return tuple(cast(x, dtype) for x in args), {k: cast(x, dtype) for k, x in kwargs.items()}

    def end_call(self, block: Block, output: Any) -> None:
        """Ends a block's forward, but for one that is computed again or was called by itself."""
        if block.computes and not in_backward():
            if not block.has_trained and torch.is_grad_enabled():
                block.look_for_keepers()
                block.has_trained = self.training
            found = list(tensors_in([output, *map(vars, block.keepers)]))
            if not found and block is not self.root and torch.is_grad_enabled():
                raise RuntimeError(NO_TENSOR.format(name=block.name, kind=type(output).__name__))
            outputs = [x for x in found if x.grad_fn is not None]
            self.leave(block, outputs)
            if block is self.root:
                self.order.end(self.agree)
                self.order.way_back = self.order.way if outputs else self.order.way_back

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
        units: Any = self.schedule.buckets[self.schedule.launched :]
        return self.order.way_back.has_entered(next((u.name for u in units if u.name), ""))

    def catch_up(self) -> None:
        """Starts the gathers that come before the next bucket, if backward has not."""
        while not self._is_next():  # it has failed, or not begun
            self.order.way_back.go_on(self.start)

    def wait(self, unit: Any, handle: Any) -> None:
        noted(partial(super().wait, unit, handle), "reduction", unit.name)

    def finish_gradient_synchronization(self) -> None:
        with without_torch_functions():
            super().finish_gradient_synchronization()

    def exchange(self, status: str) -> list[str]:
        """Returns the status of every rank; an error says what may have happened."""
        return noted(partial(super().exchange, status), "gather", "")

    def agree(self, act: str, differ: str = NOT_THE_SAME) -> None:
        agree(self.exchange, act, differ=differ)

    def agree_on_forward(self, act: str) -> None:
        """Returns once all ranks begin such a forward; others may be in a step or evaluate."""
        self.end_calls()
        self.order.way_back.complete(self.start)
        if not self.order.is_ahead:
            self.free()
        self.agree(act)
        self.order.has_agreed = True

    def end_calls(self) -> None:
        for block in self.blocks:
            block.mark(computes=False)

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Enters a context with whole parameters in the network; changes of them are kept.

        They are other tensors than those of training, in the dtype of the slices. A collective
        call; inside, one rank alone may call the network, and enter another one.
        """
        if self.is_whole:
            yield
            return
        self.free()
        units = [unit for block in self.blocks for unit in block.units]
        whole: dict[Parameter, Parameter] = {}
        for unit in units:
            for p, value in zip(unit.parameters, gather(unit, unit.shard), strict=True):
                whole[p] = Parameter(value, requires_grad=p.requires_grad)
        places = [
            (module, name, p)
            for module in self.module.modules()
            for name, p in own(module, "parameters").items()
            if p in whole  # none that was added to the network since
        ]
        try:
            self.is_whole = True
            for module, name, p in places:
                setattr(module, name, whole[p])
            yield
            with torch.no_grad():
                for unit in units:
                    keep(unit, whole)
        finally:
            for module, name, p in places:
                setattr(module, name, p)
            self.is_whole = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole state, on every rank. A collective call."""
        with self.whole_parameters():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's slices of a whole state, which must be the same on every rank.

        Raises:
            ValueError: for `assign=True`.
            RuntimeError: inside of `whole_parameters`, and for a state that does not fit; the
                parameters stay as they were.
        """
        if assign:
            raise ValueError("load_state_dict: a rank keeps slices of its own, give assign=False")
        if self.is_whole:
            raise RuntimeError("load_state_dict: leave whole_parameters() first, on all ranks")
        with self.whole_parameters():
            return super().load_state_dict(state_dict, strict=strict)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._param_dtype is not None and self.gradient_dtype is None:
            self.gradient_dtype = torch.float32  # of what adds up, in place of `param_dtype`
        with super().no_sync():
            yield
