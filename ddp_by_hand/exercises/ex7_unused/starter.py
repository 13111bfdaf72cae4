"""Exercise 7, unused: a parameter that took no part in the backward pass.

What
    A layer may be skipped on some ranks: a router chose another expert, or a modality is missing
    from the batch. Its gradient is then None here and a tensor elsewhere, and still every rank must
    take part in its reduction.

                           gradient on rank 0   on rank 1        .grad afterwards, on both
        common layer               g0               g1           (g0 + g1) / 2
        expert A                   g0              None          (g0 + 0) / 2
        expert B                  None              g1           (0 + g1) / 2
        expert C                  None             None          None

Why it matters
    A rank that omits the gradients that it lacks issues fewer collectives than the others. They
    hang or, with equal shapes, are matched with the wrong ones, without an error. And zeros in
    place of None are not the same: AdamW decays a parameter whose gradient is zero and leaves one
    without gradient alone, so training would differ from a single process.

Rules
    - A rank that did not use a parameter contributes zeros. The divisor is the number of ranks.
    - What no rank used keeps `.grad` None on all.
    - No rank knows which parameters others used: that takes one more collective. One is enough.

Overlap is not required. Reduce in finish, as in exercise 1.

Check it        ddp-exercise check unused my_unused.py
Benchmark it    ddp-benchmark --implementations none torch_ddp my_unused.py:UnusedDDP
Then read       ddp/internals/unused.py, and `filled` in gradients.py: there it overlaps
"""

import torch
import torch.distributed as dist
from torch import nn


class UnusedDDP(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("find out together what was used; reduce that, zeros included")
