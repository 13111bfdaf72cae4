r"""Exercise 6, no_sync: several backwards, one reduction.

What
    A large batch is often cut into microbatches whose gradients add up. Only the last backward
    needs to communicate. Inside `with model.no_sync():` gradients accumulate locally. The first
    backward outside reduces the whole sum.

        with no_sync   backward ▓▓▓▓▓  backward ▓▓▓▓▓  backward ▓▓▓▓▓        (outside)
                                                           ░░░░░░░         one reduction
        without        backward ▓▓▓▓▓  backward ▓▓▓▓▓  backward ▓▓▓▓▓
                            ░░░░░░░        ░░░░░░░        ░░░░░░░          three

Why it matters
    Three microbatches then send a third of the bytes. And an exception inside the block, which is
    caught further up (a batch that did not fit into memory), must not switch the synchronisation
    off for the rest of the training: replicas would drift apart without an error.

Rules
    - Inside no_sync no collective starts.
    - Blocks may be nested. The end of an inner one leaves the outer one as it was.
    - However a block ends, what held before it holds after it.
    - After backwards inside no_sync only, finish has nothing to do: gradients stay local sums.

Begin with your own exercise 2: copy start_reduction and finish from it, and change them.

Check it        ddp-exercise check no_sync my_no_sync.py
Benchmark it    ddp-benchmark --implementations none torch_ddp \
                    my_no_sync.py:AccumulatingDDP
Then read       `no_sync` in ddp/internals/interface.py, and `forward` in ddp/base.py, which
                also broadcasts the buffers before each forward that will synchronise
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class AccumulatingDDP(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.synchronizing = True
        self.handles = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_reduction)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        raise NotImplementedError("switch synchronisation off, yield, and put back what was there")
        yield

    @torch.no_grad()
    def start_reduction(self, parameter: nn.Parameter) -> None:
        raise NotImplementedError("as in exercise 2, unless synchronisation is off")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        raise NotImplementedError("as in exercise 2")
