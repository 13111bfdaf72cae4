"""Which modules of a network are blocks of `fsdp`, and in which order they are called.

All ranks gather and reduce in one order, in forward and in backward. If two gathered different
blocks at the same time, they would compute with a mixture of both, without any error
(ddp/schedule.py says why).
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.internals.unused import tensors_in
from ddp.sharded.units import GatheredUnit
from ddp.torch_compat import at_end_of_backward, number_of_backward, own

CREATES_GRAPH = (
    "create_graph=True through a block of fsdp, whose parameters are freed before a second "
    'derivative needs them: use wrap("zero2", module)'
)
OTHER_ORDERS = (
    "the ranks call units in different orders: {acts}; ranks gather units together, so give "
    'units= only modules that all ranks call in one order, or use wrap("zero2", module)'
)

Agree = Callable[[str, str], None]
"""Raises on all ranks if they are about to do different things: what, and the message."""


class Block:
    """A module whose parameters are gathered just before it computes.

    Attributes:
        name: its name in the network; "" is the network itself, which has the rest.
        units: its parameters, by dtype and whether they are trained.
        around: the block itself and those that contain it, but not the network.
        computes: its forward is running.
        keepers: its modules that keep tensors of a forward, as `self.loss = ...` does.
        has_trained: the first forward in training, which tells keepers, is over.
    """

    def __init__(self, name: str, module: nn.Module, units: list[GatheredUnit]):
        self.name, self.module, self.units = name, module, units
        self.around: list[Block] = []
        self.keepers: list[nn.Module] = []
        self.has_trained = False
        self.computes = False

    def mark(self, computes: bool) -> None:
        self.computes = computes
        for unit in self.units:
            unit.computes = computes

    def free(self) -> None:
        for unit in self.units:
            unit.free()

    def look_for_keepers(self) -> None:
        modules = self.module.modules()
        self.keepers = [m for m in modules if any(x.grad_fn for x in tensors_in(vars(m)))]


Enter = Callable[[Block, tuple, dict], tuple[tuple, dict] | None]
Leave = Callable[[Block, Any], None]


def blocks_of(
    network: nn.Module,
    classes: Sequence[type[nn.Module]] | None,
    group: dist.ProcessGroup,
    param_dtype: torch.dtype | None,
) -> list[Block]:
    """Divides a network's parameters among the ranks of a group. The first block has the rest."""
    blocks = []
    for name, names in parameters_by_block(network, classes).items():
        groups: dict[tuple, dict[Parameter, str]] = {}
        for p, full_name in names.items():  # of no block: by child, so that the head goes early
            child = "" if name else full_name.partition(".")[0]
            groups.setdefault((p.dtype, p.requires_grad, child), {})[p] = full_name
        units = []
        for (dtype, *_), each in groups.items():
            narrow = param_dtype if dtype.is_floating_point else None
            units.append(GatheredUnit(each, group, narrow or dtype, name))
        blocks.append(Block(name, network.get_submodule(name), units))
    for block in blocks[1:]:
        block.around = [b for b in blocks[1:] if f"{block.name}.".startswith(f"{b.name}.")]
    return blocks


def parameters_by_block(
    network: nn.Module, classes: Sequence[type[nn.Module]] | None
) -> dict[str, dict[Parameter, str]]:
    """Returns the name of each block -> its parameters and their names; "" is the network itself.

    A block is a member of an `nn.ModuleList`, or a module of one of `classes`. A parameter belongs
    to the innermost block around it. One that two blocks share, itself or with its module, belongs
    to the network itself.
    """
    lists = [m for m in network.modules() if isinstance(m, nn.ModuleList)]
    chosen = {member for members in lists for member in members}
    if classes is not None:
        chosen = {m for m in network.modules() if isinstance(m, tuple(classes))}
    block_of = {"": ""}
    first: dict[nn.Module, str] = {network: ""}
    owner: dict[Parameter, str] = {}
    names: dict[Parameter, str] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        around = block_of[path.rpartition(".")[0]]
        block = first.setdefault(module, path) if module in chosen else around
        block_of[path] = block
        for name, parameter in own(module, "parameters").items():
            if parameter is not None:
                owner[parameter] = block if owner.get(parameter, block) == block else ""
                names.setdefault(parameter, f"{path}.{name}" if path else name)
    found: dict[str, dict[Parameter, str]] = {"": {}}
    for parameter, block in owner.items():
        found.setdefault(block, {})[parameter] = names[parameter]
    return found


def call_around(block: Block, enter: Enter, leave: Leave) -> None:
    """Calls two methods of a wrapper around each forward of a block's module.

    The first one returns other arguments for it, or None.

    The hooks hold the wrapper weakly and go with it. `torch.compile` does not trace them, where
    it was in use when the network was wrapped.
    """
    weak_enter, weak_leave = weakref.WeakMethod(enter), weakref.WeakMethod(leave)

    def before(module: nn.Module, args: tuple, kwargs: dict) -> Any:
        is_here = module is block.module  # a deep copy of the network has these hooks too
        return method(block, args, kwargs) if is_here and (method := weak_enter()) else None

    def after(module: nn.Module, _inputs: tuple, output: Any) -> None:
        if (method := weak_leave()) is not None and module is block.module:
            method(block, output)

    if "torch._dynamo" in sys.modules:
        before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    for handle in (
        block.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        block.module.register_forward_hook(after),
    ):
        weakref.finalize(enter.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Returns an argument of a forward, converted if it is a tensor of floating-point numbers."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


Start = Callable[[Sequence[GatheredUnit]], None]


class WayBack:
    """The blocks that a forward has left; its backward enters them in reverse.

    All ranks gather and reduce in that order. So a rank whose backward has failed, or has not
    begun, knows what the others still wait for.

    Attributes:
        blocks: those blocks, one that is called twice in two places.
        ahead: how many of them backward has not entered.
        is_over: a backward has come to its end; another one may follow, through a kept graph.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.ahead, self.is_over = 0, False

    def add(self, block: Block) -> int:
        """Adds a block that forward has left; returns its place."""
        self.blocks.append(block)
        self.ahead, self.is_over = len(self.blocks), False  # a backward in the forward may be over
        return self.ahead - 1

    def begin(self) -> None:
        if self.is_over:
            self.ahead, self.is_over = len(self.blocks), False

    def has_entered(self, name: str) -> bool:
        """Returns whether backward has entered all calls of a block; "": of all blocks."""
        names = [block.name for block in self.blocks[: self.ahead]]
        return name not in names if name else not names

    def go_on(self, start: Start) -> None:
        """Enters a block: frees those that backward has left, starts this one and the next."""
        self.ahead -= 1
        needed = self.blocks[max(0, self.ahead - 1) : self.ahead + 1]
        left = self.blocks[self.ahead + 1].around if self.ahead + 1 < len(self.blocks) else []
        for block in left:
            if block not in (*needed, *needed[-1].around):
                block.free()
        for block in reversed(needed):
            start(block.units)

    def complete(self, start: Start) -> None:
        """Goes on to the end after a backward that has failed: others may have come further."""
        while not self.is_over and 0 < self.ahead < len(self.blocks):
            self.go_on(start)


class CallOrder:
    """The order in which blocks are called, and how far this rank has come in it.

    Apart from the wrapper: to set attributes of modules is slow.

    Attributes:
        blocks: the order of the first forward, which all others must follow; None before its end.
        way, way_back: the blocks that the last forward has left; those of the last backward.
        backward: the number of the one that runs, not of those inside of it.
        is_ahead: the optimizer has started the gathers of the next forward.
        has_agreed: all ranks are about to begin this forward.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] | None = None
        self.way_back, self.backward = WayBack(), -1
        self.begin()

    def begin(self) -> None:
        """Begins a forward."""
        self._calls: list[Block] = []
        self.way, self.is_ahead, self.has_agreed = WayBack(), False, False

    def next_block(self) -> Block | None:
        """Returns the block that is called next, where that is known."""
        return next(iter(self._expected()), None)

    def call(self, block: Block, agree: Agree) -> None:
        """Notes a call. In the first forward the ranks compare it before they gather the block.

        Raises:
            RuntimeError: if another one was to come (on this rank), or if ranks call different
                ones in the first forward (on every rank).
        """
        then = self.next_block()
        if self.blocks is None:
            agree(block.name, OTHER_ORDERS)
        elif then is not block:
            raise RuntimeError(
                f"{block.name} is called where in the first forward "
                f"{'the forward ended' if then is None else then.name + ' was'}: ranks gather "
                "units together, so every forward must call the same ones in the same order; "
                'give units= only such modules, or use wrap("zero2", module)'
            )
        self._calls.append(block)

    def end(self, agree: Agree) -> None:
        """Ends a forward.

        Raises:
            RuntimeError: if a block was not called.
        """
        if missing := [block.name for block in self._expected()]:
            raise RuntimeError(
                f"this forward has not called {', '.join(missing)}, as the first one did: "
                "every forward must call the same units in the same order"
            )
        if self.blocks is None:
            agree("the end of the forward", OTHER_ORDERS)
            self.blocks = self._calls

    def _expected(self) -> list[Block]:
        return [] if self.blocks is None else self.blocks[len(self._calls) :]

    def enter_backward(self, way: WayBack, at_end: Callable[[], None]) -> None:
        """Notes that a backward is on its way back, and calls `at_end` once it has ended."""
        if torch.is_grad_enabled():
            raise RuntimeError(CREATES_GRAPH)

        def end() -> None:
            self.way_back.is_over, self.backward = True, -1
            at_end()

        if (number := number_of_backward()) != self.backward:
            self.backward = number
            at_end_of_backward(end)
        way.begin()
        self.way_back = way
