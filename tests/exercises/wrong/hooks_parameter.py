"""The hook's argument is taken for the gradient."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import hooks


class OverlapDDP(hooks.OverlapDDP):
    @torch.no_grad()
    def start_reduction(self, gradient):
        gradient /= dist.get_world_size()
        self.handles.append((dist.all_reduce(gradient, async_op=True), gradient))

    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        self.handles.clear()
