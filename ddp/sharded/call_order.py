"""Checks that blocks are called in one order: in every forward, and on every rank.

Collectives match by call order alone. If two ranks gathered different blocks at the same time, they
would compute with a mixture of both, without any error.
"""

import torch.distributed as dist

from ddp.sharded.units import Block


class CallOrder:
    """The order in which the first forward called the blocks, which all others must follow.

    Attributes:
        blocks: that order; None before the first forward has ended.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.blocks: list[Block] | None = None
        self.begin()

    def begin(self) -> None:
        self._calls: list[Block] = []

    def next_block(self) -> Block | None:
        """Returns the block that is called next, where that is known."""
        return next(iter(self._expected()), None)

    def call(self, block: Block) -> None:
        """Notes a call; raises RuntimeError if another one was to come."""
        if self.blocks is not None and self.next_block() is not block:
            then = self.next_block()
            raise RuntimeError(
                f"{block.name} is called where in the first forward "
                f"{'the forward ended' if then is None else then.name + ' was'}: ranks gather "
                "units together, so every forward must call the same ones in the same order; "
                'give units= only such modules, or use wrap("zero2", module)'
            )
        self._calls.append(block)

    def end(self) -> None:
        """Ends a forward. The first one is compared among ranks, a collective call.

        Raises:
            RuntimeError: if a block was not called, or the ranks called them in different orders.
        """
        if self.blocks is not None:
            if missing := [block.name for block in self._expected()]:
                raise RuntimeError(
                    f"this forward has not called {', '.join(missing)}, as the first one did: "
                    "every forward must call the same units in the same order"
                )
            return
        names = [block.name for block in self._calls]
        everyone: list[list[str]] = [[]] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, names, group=self._group)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise RuntimeError(
                    "the ranks called units in different orders, and gathered different ones "
                    f"together: {', '.join(everyone[0])} on rank 0, {', '.join(theirs)} on rank "
                    f"{rank}"
                )
        self.blocks = self._calls

    def _expected(self) -> list[Block]:
        return [] if self.blocks is None else self.blocks[len(self._calls) :]
