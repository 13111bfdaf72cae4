"""Exercise 5, order: the same collectives in the same order on every rank.

What
    Collectives match by the order of the calls. They carry no name. If rank 0 starts the all-reduce
    of layer A and then of B, and rank 1 of B and then of A, the sums are A + B and B + A. With
    equal shapes there is no error.

        rank 0   gradients ready   C  A  B        started   C  B  A     the agreed order
        rank 1   gradients ready   C  B  A        started   C  B  A     is the same
                                                   A is held back until B is ready

Why it matters
    Autograd's order follows the graph of this rank's forward. A router that sends two batches
    through the experts in two orders is enough. Most hand-built versions start what is ready, and
    then train on mixed gradients.

Rules
    - Agree before the first step, without communication: every rank can compute the reverse of the
      registration order, and it is nearly the order in which gradients become ready.
    - A hook marks its gradient as ready. It then starts every all-reduce that is next in the agreed
      order and ready, and no other.
    - Keep what exercise 2 gained: the first all-reduce still starts during backward.
    - Every step begins anew.

Check it        ddp-exercise check order my_order.py
Benchmark it    ddp-benchmark --implementations none torch_ddp my_order.py:OrderedDDP
Then read       ddp/schedule.py, and `_agree_on_order` in ddp/internals/step.py,
                which replaces the reverse order once by that of rank 0's gradients
"""

import torch
import torch.distributed as dist
from torch import nn


class OrderedDDP(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        for parameter in self.order:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called by autograd when parameter.grad has been accumulated."""
        raise NotImplementedError("mark it ready; start what is next in self.order and ready")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("wait, make means of the sums, and be ready for the next step")
