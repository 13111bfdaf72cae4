"""The handles of earlier steps are kept."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import hooks


class OverlapDDP(hooks.OverlapDDP):
    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()
