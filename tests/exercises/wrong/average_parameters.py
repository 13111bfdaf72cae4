"""The parameters are averaged in place of their gradients."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import average


class AverageDDP(average.AverageDDP):
    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
