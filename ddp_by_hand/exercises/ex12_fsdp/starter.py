"""Exercise 12, fsdp: gather parameters just before a block computes with them, and free them after.

What
    A rank owns a slice of each block's parameters. All of them exist while the block computes.

        computation      forward 0 | forward 1 | forward 2     backward 2 | backward 1 | backward 0
        communication    gather 1  | gather 2  |  -            gather 1   | gather 0   | reduce 1
                                                                          | reduce 2   |
        whole            0 1         1 2         2             2 1          1 0          0

Why it matters
    Parameters, gradients and optimizer state are then all 1/W, and the largest model is W times as
    large. The price is one more gather. It is hidden, if the next block's starts in time.

Rules
    - Before block k's forward: gather it, unless it is there, and wait. Start to gather block k + 1
      and do not wait: that is the prefetch. After its forward free block k.
    - The same in backward, with block k - 1. When the last gradient of block k is there, backward
      uses the block no more: free it, and start to reduce-scatter its gradients.
    - `values` is one buffer as long as the unit lives. To free it, resize its storage to 0; to get
      it back, resize again. Autograd has saved views of it, such as a layer's transposed weight,
      and they must see what the gather in backward writes. They would not see a new buffer.
    - Nothing that was started is read, written, or freed before it was waited for.
    - The blocks are the members of nn.ModuleLists, called in order. What is in no block, as the
      embedding, is the unit `root`: whole from forward to finish, which reduces and frees it.
    - After finish each unit.own.grad is a mean, in a tensor of the slice's size, and every
      parameter.grad is None. All parameters get gradients in this exercise.

You need
    tensor.untyped_storage().resize_(nbytes)         .size() is what it has now
    unit.views(unit.values)                          what the parameters are while they are whole
    unit.show(views), unit.hide()                    give the parameters these values, or NaN
    unit.flatten, all_gather, reduce_scatter         as in exercise 11

Check it        ddp-exercise check fsdp my_fsdp.py
Benchmark it    ddp-benchmark --implementations none fsdp my_fsdp.py:FullyShardedDDP
Then read       ddp/sharded/fsdp.py, and ddp/sharded/units.py, which says why a storage is resized
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp.torch_compat import all_gather, reduce_scatter  # noqa: F401 - you will need them
from ddp_by_hand.exercises.sharded import GatheredUnit, Sharded, blocks_of


class MyUnit(GatheredUnit):
    """Begins with the memory of all values, then is freed; `own` is a copy of the slice."""

    def start(self) -> None:
        """Starts to gather `values` from every rank's `own`, unless they have memory already."""
        raise NotImplementedError("resize the storage of self.values; start an all-gather into it")

    def wait(self) -> None:
        """Waits for what `start` has started; the parameters are whole then."""
        raise NotImplementedError("wait for the gather, then show the views of self.values")

    def free(self) -> None:
        raise NotImplementedError("hide the parameters, then give the memory of self.values back")


class FullyShardedDDP(Sharded):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        modules, rest = blocks_of(module)
        self.blocks = [MyUnit(block.parameters()) for block in modules]
        self.root = MyUnit(rest)
        self.units = [self.root, *self.blocks]
        for k, block in enumerate(modules):
            block.register_forward_pre_hook(lambda *_, k=k: self.before_forward(k))
            block.register_forward_hook(lambda *_, k=k: self.after_forward(k))
            block.register_full_backward_pre_hook(lambda *_, k=k: self.before_backward(k))
            for parameter in self.blocks[k].trained:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, k=k: self.gradient_ready(k, p)
                )
        for unit in self.units:
            unit.free()
        self.begin_step()

    def forward(self, *args, **kwargs):
        self.root.start()
        self.root.wait()
        return self.module(*args, **kwargs)

    def make_optimizer(self, cls, **options) -> torch.optim.Optimizer:
        return cls([unit.own for unit in self.units], **options)  # the next forward gathers

    def begin_step(self) -> None:
        raise NotImplementedError("nothing is ready, and no reduction is on the wire")

    def before_forward(self, k: int) -> None:
        """Called when block k is about to compute."""
        raise NotImplementedError("gather block k, and start block k + 1 if there is one")

    def after_forward(self, k: int) -> None:
        raise NotImplementedError("free block k")

    def before_backward(self, k: int) -> None:
        """Called when the gradient of block k's output is there, and nothing behind it."""
        raise NotImplementedError("gather block k, and start block k - 1 if there is one")

    @torch.no_grad()
    def gradient_ready(self, k: int, parameter: nn.Parameter) -> None:
        """Called when the .grad of a parameter of block k has been accumulated."""
        raise NotImplementedError("if it is the last of block k, free it and reduce its gradients")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("reduce the root and free it; wait for all, make means")
