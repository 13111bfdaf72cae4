"""A frozen parameter's missing gradient is not expected."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import average


class AverageDDP(average.AverageDDP):
    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
