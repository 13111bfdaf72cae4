"""Only rank 0 broadcasts; the others do not know that they must call it too."""

import torch.distributed as dist

from tests.exercises.solutions import average


class AverageDDP(average.AverageDDP):
    def make_replicas_equal(self):
        if dist.get_rank() != 0:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), src=0)
