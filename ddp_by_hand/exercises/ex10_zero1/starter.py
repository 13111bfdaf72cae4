r"""Exercise 10, zero1: each rank keeps the optimizer's state of one slice, and steps that alone.

What
    An all-reduce is a reduce-scatter, then an all-gather (exercise 8). Put the optimizer between
    the two, and gather parameters in place of gradients.

        all parameters, flat     [ weight 0   | bias 0 | weight 1     | bias 1 | pad ]
        what each rank steps     [ rank 0            | rank 1                        ]

        reduce-scatter gradients  →  step the own slice  →  all-gather parameters

Why it matters
    After an all-reduce all ranks compute the same step, from the same state: for Adam, twice the
    size of the parameters on every rank. Here state and step are 1/W, for the same bytes sent.

Rules
    - self.flat has all trained parameters in order, then zeros until the ranks divide its length.
      Every parameter becomes a view of it. self.own is this rank's slice, a view too, which
      requires a gradient: a leaf that an optimizer accepts.
    - finish makes self.own.grad the mean over the ranks, and takes every parameter.grad away.
      A parameter without a gradient counts as zeros.
    - The optimizer is an ordinary one, over self.own. After each of its steps every rank has all
      new values.
    - A checkpoint is whole, so that it loads on another number of ranks: for every tensor of the
      optimizer's state that has a number for each of self.own, all ranks' numbers without padding.

You need
    parameter.data = view                            the parameter has the view's memory from now on
    reduce_scatter(own, flat, op, group).wait()      own: this rank's slice of the sum of all flats
    all_gather(flat, own, group).wait()              flat: all slices; own may be a part of it
        op and group: dist.ReduceOp.SUM and dist.group.WORLD. The two call PyTorch's functions,
        which torch 2.13 has renamed.
    optimizer.register_step_post_hook(hook)          calls hook(optimizer, args, kwargs) after step
    optimizer.state[tensor]                          a dict, as {"step": ..., "exp_avg": ...}

Check it        ddp-exercise check zero1 my_zero1.py
Benchmark it    ddp-benchmark \
                    --implementations none ddp_bucketed zero1 my_zero1.py:StateShardedDDP
Then read       ddp/sharded/layout.py, ddp/sharded/slices.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.torch_compat import all_gather, reduce_scatter  # noqa: F401 - you will need them
from ddp_by_hand.exercises.sharded import Sharded


class StateShardedDDP(Sharded):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.units = [self]
        self.flatten_parameters()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def flatten_parameters(self) -> None:
        raise NotImplementedError("make self.flat and self.own; parameters become views of flat")

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Called after backward and before optimizer.step()."""
        raise NotImplementedError("reduce-scatter a flat tensor of all gradients to self.own.grad")

    def make_optimizer(self, cls, **options) -> torch.optim.Optimizer:
        """Returns an optimizer, such as cls(..., lr=0.1), after whose step all values are new."""
        raise NotImplementedError("an optimizer of self.own; gather self.flat after each step")

    @torch.no_grad()
    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Returns the optimizer's state of all ranks, without padding, on every rank."""
        raise NotImplementedError("gather what has a number for each of self.own; keep the rest")

    @torch.no_grad()
    def load_whole_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Tensor]) -> None:
        """Gives a new optimizer this rank's part of what whole_state has returned."""
        raise NotImplementedError("pad, take this rank's slice, put it into optimizer.state")
