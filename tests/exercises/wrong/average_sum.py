"""The sum is not divided."""

import torch.distributed as dist

from tests.exercises.solutions import average


class AverageDDP(average.AverageDDP):
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
