r"""Exercise 14, diloco: ranks train apart, and take one step together in many.

What
    Each rank takes `every` steps of its own optimizer, with its own gradients. Then all ranks agree
    on one place, and begin the next round there.

        rank 0   start → → → → end 0 \
                                      mean of start - end: a gradient  →  one outer step
        rank 1   start → → → → end 1 /

Why it matters
    1/every of the bytes, and of the waiting for the slowest rank: it is what one does where the
    network between ranks is slow. It is no longer the same training: what it costs in loss is
    measured in docs/variants.md.

Rules
    - finish_gradient_synchronization has nothing to do, and sends nothing.
    - The optimizer is an ordinary one over self.trained. Behind each of its steps one is counted;
      behind number `every` comes the outer step, and the count begins anew.
    - start is where all ranks were when the round began. delta is the mean over the ranks of start
      minus where each is now. The outer step is SGD's with Nesterov momentum, from start:

          momentum = outer_momentum * momentum + delta
          parameter = start - outer_lr * (delta + outer_momentum * momentum)

    - momentum begins at zero, and is kept from round to round.

You need
    optimizer.register_step_post_hook(hook)          calls hook(optimizer, args, kwargs) after step
    dist.all_reduce(tensor)                          the sum over the ranks, in place

Check it        ddp-exercise check diloco my_diloco.py
Then read       ddp/diloco.py
"""

import torch
import torch.distributed as dist
from torch import nn


class LocalStepsDDP(nn.Module):
    def __init__(self, module: nn.Module, every: int, outer_lr=0.7, outer_momentum=0.9):
        super().__init__()
        self.module, self.every = module, every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do: a rank steps with its own gradients."""

    def make_optimizer(self, cls, **options) -> torch.optim.Optimizer:
        """Returns an optimizer, such as cls(self.trained, lr=0.1), whose steps are counted."""
        raise NotImplementedError("count the steps behind each one; every so many, outer_step()")

    @torch.no_grad()
    def outer_step(self) -> None:
        raise NotImplementedError("average start - parameter over the ranks, and step from start")
