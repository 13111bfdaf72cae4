import torch
import torch.distributed as dist
from torch import nn


class AverageDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.make_replicas_equal()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def make_replicas_equal(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
