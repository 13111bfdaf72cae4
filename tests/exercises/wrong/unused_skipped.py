"""A rank leaves out what it has not got."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import unused


class UnusedDDP(unused.UnusedDDP):
    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
