"""`zero2`: each rank keeps the gradients of its own slice only.

The problem with `zero1`: after a bucket's reduce-scatter a rank uses 1/W of it, yet all of
it stays allocated until the gradients are cleared.

The idea (ZeRO stage 2, https://arxiv.org/abs/1910.02054): reduce-scatter into a buffer of a slice's
size, and free the bucket. A collective reads the bucket until it has finished, so a launch first
waits for the last but one: the gradients of three buckets are allocated at most, those that become
ready and two on the wire, whatever the size of the network.

What remains: parameters are whole on every rank, though a layer's are used only while that layer
computes. Gradients that accumulate over several backwards, under `no_sync` too, are whole
until they are reduced.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp.sharded.zero1 import Zero1DDP


class Zero2DDP(Zero1DDP):
    """Does as `Zero1DDP`, and frees each bucket of gradients once it is reduced."""

    frees_gradients = True

    def launch(self, unit: Any) -> tuple[dist.Work, Tensor, Tensor]:
        self.wait_for(*list(self.schedule.in_flight)[:-1])
        return super().launch(unit)
