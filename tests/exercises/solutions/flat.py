import torch
import torch.distributed as dist
from torch import nn

from tests.exercises.solutions.plan import plan_buckets


class FlatDDP(nn.Module):
    tail_share = 0.25

    def __init__(self, module, *, bucket_size_mb=25):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.make_buckets(int(bucket_size_mb * (1 << 20)))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def make_buckets(self, capacity):
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        plan = plan_buckets(
            [p.nbytes for p in parameters],
            [str(p.dtype) for p in parameters],
            list(reversed(range(len(parameters)))),
            capacity,
            tail=int(capacity * self.tail_share),
        )
        self.buckets = [[parameters[i] for i in members] for members in plan]
        self.flats = [torch.empty(sum(p.numel() for p in b)).to(b[0]) for b in self.buckets]
        self.begin_step()

    def begin_step(self):
        self.ready = set()
        self.handles = []

    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        while len(self.handles) < len(self.buckets) and self.ready.issuperset(self.next()):
            flat = self.flats[len(self.handles)]
            self.fill(flat, self.next())
            self.handles.append(dist.all_reduce(flat, async_op=True))

    def next(self):
        return self.buckets[len(self.handles)]

    def fill(self, flat, bucket):
        start = 0
        for parameter in bucket:
            view = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
                parameter.grad = view

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, flat in zip(self.handles, self.flats, strict=True):
            handle.wait()
            flat /= dist.get_world_size()
        self.begin_step()
