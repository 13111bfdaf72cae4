import torch
import torch.distributed as dist
from torch import nn


class UnusedDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        used = torch.tensor([int(p.grad is not None) for p in parameters])
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, used_by_any in zip(parameters, used.tolist(), strict=True):
            if used_by_any:
                self.average(parameter)

    def average(self, parameter):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
