"""The hook waits: it is called early and nothing overlaps."""

import torch.distributed as dist

from tests.exercises.solutions import hooks


class OverlapDDP(hooks.OverlapDDP):
    def start_reduction(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
