"""Buffers are forgotten."""

import torch.distributed as dist

from tests.exercises.solutions import average


class AverageDDP(average.AverageDDP):
    def make_replicas_equal(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), src=0)
