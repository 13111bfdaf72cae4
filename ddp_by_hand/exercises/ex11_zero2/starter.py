r"""Exercise 11, zero2: reduce-scatter a bucket when it is ready, and free the rest of it.

What
    Exercise 10 left all gradients in memory, and began to communicate after backward. Divide the
    parameters into buckets (exercise 9). When a bucket's gradients are ready, bring them into a
    new flat tensor, take them away, and reduce-scatter the flat tensor into a slice. The slice is
    all that stays.

        memory of gradients, 2 ranks, as backward goes on
            exercise 10   ▓▓  ▓▓▓▓  ▓▓▓▓▓▓  ▓▓▓▓▓▓▓▓  ▓▓▓▓▓▓▓▓▓▓
            now           ▓▓  ▓▓▓▓  ▒▓▓▓▓   ▒▒▓▓▓▓    ▒▒▒▓▓▓▓       ▒ a slice of a bucket

Why it matters
    Gradients take as much memory as parameters, and in float32 twice as much as those in bfloat16.
    No rank needs more than the slice that it steps.

Rules
    - The buckets start in the order of self.units on every rank, during backward (exercise 5).
    - A collective reads the flat tensor until it has been waited for: free it then, and not before.
    - At most two buckets are on the wire, or memory grows as before: before a bucket's flat tensor
      is made, wait for the last but one. The last one may travel while the next is filled.
    - After finish each unit.own.grad is a mean, in a tensor of the slice's size, and every
      parameter.grad is None. All parameters get gradients in this exercise.

You need
    unit.flatten(tensors)                            a new flat tensor with one for each parameter
    unit.own, unit.trained                           this rank's slice, and the bucket's parameters
    handle = reduce_scatter(own, flat, op, group)    as in exercise 10; it returns at once
    tensor memory is freed when nothing refers to it: a list of handles, a view, a local variable

Check it        ddp-exercise check zero2 my_zero2.py
Benchmark it    ddp-benchmark --bucket-size-mb 1 \
                    --implementations none zero1 zero2 my_zero2.py:GradientShardedDDP
Then read       ddp/sharded/zero1.py, and ddp/sharded/zero2.py, the difference in 15 lines
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp.torch_compat import all_gather, reduce_scatter  # noqa: F401 - you will need it
from ddp_by_hand.exercises.sharded import Sharded, Unit, in_buckets


class GradientShardedDDP(Sharded):
    def __init__(self, module: nn.Module, *, bucket_size_mb: float = 25):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.units = [Unit(bucket) for bucket in in_buckets(module, bucket_size_mb)]
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        self.begin_step()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def make_optimizer(self, cls, **options) -> torch.optim.Optimizer:
        optimizer = cls([unit.own for unit in self.units], **options)
        optimizer.register_step_post_hook(lambda *_: self.gather_parameters())
        return optimizer

    @torch.no_grad()
    def gather_parameters(self) -> None:
        handles = [all_gather(u.values, u.own, dist.group.WORLD) for u in self.units]
        for handle in handles:
            handle.wait()

    def begin_step(self) -> None:
        raise NotImplementedError("nothing is ready, and nothing is on the wire")

    @torch.no_grad()
    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called by autograd when parameter.grad has been accumulated."""
        raise NotImplementedError("mark it ready; start the buckets that are next and complete")

    def start(self, unit: Unit) -> None:
        raise NotImplementedError("wait for the last but one; flatten, take away, reduce-scatter")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("wait for what is on the wire, and be ready for the next step")
