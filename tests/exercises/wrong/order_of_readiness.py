"""What is ready is started: the usual hand-built version."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import order


class OrderedDDP(order.OrderedDDP):
    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.handles.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.begin_step()
