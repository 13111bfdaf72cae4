"""Exercise 2, hooks: communicate gradients during the backward pass.

What
    The last layer's gradient is ready when backward has barely begun. Start its all-reduce at that
    moment and continue. finish_gradient_synchronization() then waits for those still running.

        exercise 1   backward ▓▓▓▓▓▓▓▓▓▓▓▓                        computation
                                          ░░░░ ░░░░ ░░░░          communication, all exposed

        now          backward ▓▓▓▓▓▓▓▓▓▓▓▓
                                  ░░░░ ░░░░ ░░░░                  only the last piece is exposed

Why it matters
    Communication that backward hides costs (almost) nothing: the one idea of the whole course.
    See it on your own machine, and open the timeline pictures in profiler_output/:
        ddp-benchmark --profile --implementations ddp ddp_individual

You need
    parameter.register_post_accumulate_grad_hook(hook)   calls hook(parameter) once a backward, when
                                                         parameter.grad is final. The hook receives
                                                         the parameter, not the gradient!
    dist.all_reduce(tensor, async_op=True)               returns at once with a handle
    handle.wait()                                        returns when `tensor` holds the sum

Beware
    Handles of a finished step must not be waited for again in the next one.

Check it        ddp-exercise check hooks my_hooks.py
Benchmark it    ddp-benchmark --implementations none torch_ddp my_hooks.py:OverlapDDP
Then read       ddp/individual.py, then ddp/internals/hooks.py for what else hooks handle
"""

import torch
import torch.distributed as dist
from torch import nn


class OverlapDDP(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.handles = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_reduction)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def start_reduction(self, parameter: nn.Parameter) -> None:
        """Called by autograd when parameter.grad has been accumulated."""
        raise NotImplementedError("start an all-reduce of the gradient and keep the handle")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("wait for everything that was started; gradients are then means")
