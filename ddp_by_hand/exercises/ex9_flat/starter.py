r"""Exercise 9, flat: buckets whose slices are the gradients.

What
    Put exercises 2, 4 and 5 together. When all gradients of a bucket are ready, bring them into one
    flat tensor and start one all-reduce of it. Every .grad becomes a view of its slice, so nothing
    is copied back: the optimizer reads the views.

        flat        [ weight of layer 3 | bias 3 | weight 2 | bias 2 ]     one all-reduce
                      ↑ layer3.weight.grad is this slice, reshaped

Why it matters
    One contiguous buffer is sent at the full rate of the wire. Flattening anew in every step and
    copying back afterwards is what most hand-built versions do: two more passes over all gradients,
    and the memory of one more copy.

Rules
    - At most `bucket_size_mb` MiB per bucket, one dtype, the last one small: plan_buckets of
      exercise 4, with the reverse of registration as the order. A tail of a quarter of the capacity
      will do.
    - The buckets start in the order of the plan on every rank, during backward.
    - After finish every .grad is a view of its bucket's flat tensor, and a mean.
    - zero_grad() takes the views away (.grad is None), and the next backward makes new tensors.
      zero_grad(set_to_none=False) leaves them, and autograd adds into the flat tensor; then there
      is nothing to copy. Both must work, also in turn.

You need
    flat[start : start + parameter.numel()].view_as(parameter)   a view that shares its memory

Check it        ddp-exercise check flat my_flat.py
Benchmark it    ddp-benchmark --bucket-size-mb 1 \
                    --implementations none ddp_bucketed torch_ddp my_flat.py:FlatDDP
Then read       ddp/bucketed.py and ddp/buckets.py. Then run all behaviour tests of the course:
                pytest tests/ddp --implementation my_flat.py:FlatDDP
                They ask for more than this exercise: the options of the other variants first of all
"""

import torch
import torch.distributed as dist
from torch import nn


class FlatDDP(nn.Module):
    def __init__(self, module: nn.Module, *, bucket_size_mb: float = 25):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.make_buckets(int(bucket_size_mb * (1 << 20)))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def make_buckets(self, capacity: int) -> None:
        raise NotImplementedError("plan the buckets and allocate a flat tensor for each")

    @torch.no_grad()
    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called by autograd when parameter.grad has been accumulated."""
        raise NotImplementedError("mark it ready; start the buckets that are next and complete")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("wait, make means of the sums, and be ready for the next step")
