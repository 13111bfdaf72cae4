"""Keeps the gathers and reductions of all ranks in one order, in forward and in backward.

If two ranks gathered different blocks at the same time, they would compute with a mixture of both,
without any error (ddp/schedule.py says why).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddp.sharded.internals.blocks import Block
from ddp.torch_compat import at_end_of_backward, number_of_backward

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


class CallOrder:
    """The order in which the first forward called the blocks, which all others must follow.

    Attributes:
        blocks: that order; None before the first forward has ended.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] | None = None
        self.begin()

    def begin(self) -> None:
        self._calls: list[Block] = []

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

    def go_on(self, start: Callable[[Block], None]) -> None:
        """Enters a block: frees those that backward has left, starts this one and the next."""
        self.ahead -= 1
        needed = self.blocks[max(0, self.ahead - 1) : self.ahead + 1]
        left = self.blocks[self.ahead + 1].around if self.ahead + 1 < len(self.blocks) else []
        for block in left:
            if block not in (*needed, *needed[-1].around):
                block.free()
        for block in reversed(needed):
            start(block)

    def complete(self, start: Callable[[Block], None]) -> None:
        """Goes on to the end after a backward that has failed: others may have come further."""
        while not self.is_over and 0 < self.ahead < len(self.blocks):
            self.go_on(start)


@dataclass
class Progress:
    """How far this rank has come. Apart from the wrapper: to set attributes of modules is slow.

    Attributes:
        way, way_back: the blocks that the last forward has left; those of the last backward.
        backward: the number of the one that runs, not of those inside of it.
        is_ahead: the optimizer has started the gathers of the next forward.
        has_agreed: all ranks are about to begin this forward.
    """

    way: WayBack
    way_back: WayBack
    backward: int = -1
    is_ahead: bool = False
    has_agreed: bool = False

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
