from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class AccumulatingDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.synchronizing = True
        self.handles = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_reduction)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    @torch.no_grad()
    def start_reduction(self, parameter):
        if self.synchronizing:
            handle = dist.all_reduce(parameter.grad, async_op=True)
            self.handles.append((handle, parameter))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.handles.clear()
