import torch
import torch.distributed as dist
from torch import nn


class OverlapDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.handles = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                self.watch(parameter)

    def watch(self, parameter):
        parameter.register_post_accumulate_grad_hook(self.start_reduction)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def start_reduction(self, parameter):
        handle = dist.all_reduce(parameter.grad, async_op=True)
        self.handles.append((handle, parameter))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, parameter in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.handles.clear()
