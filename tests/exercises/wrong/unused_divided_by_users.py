"""The mean is taken over the ranks that used the parameter."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import unused


class UnusedDDP(unused.UnusedDDP):
    @torch.no_grad()
    def finish_gradient_synchronization(self):
        parameters = list(self.module.parameters())
        users = torch.tensor([int(p.grad is not None) for p in parameters])
        dist.all_reduce(users)
        for parameter, count in zip(parameters, users.tolist(), strict=True):
            if count:
                self.average(parameter)
                parameter.grad *= dist.get_world_size() / count
