"""Finish divides every gradient, reduced or not."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import no_sync


class AccumulatingDDP(no_sync.AccumulatingDDP):
    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        self.handles.clear()
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()
