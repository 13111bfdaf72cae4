import torch
import torch.distributed as dist
from torch import nn


class OrderedDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.begin_step()
        for parameter in self.order:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def begin_step(self):
        self.ready = set()
        self.handles = []

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        while len(self.handles) < len(self.order) and self.next() in self.ready:
            self.handles.append(dist.all_reduce(self.next().grad, async_op=True))

    def next(self):
        return self.order[len(self.handles)]

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in zip(self.handles, self.order, strict=True):
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.begin_step()
