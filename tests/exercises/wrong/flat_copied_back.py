"""The flat tensor is made anew and the means are copied back: right, and two more passes."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import flat


class FlatDDP(flat.FlatDDP):
    def fill(self, flat, bucket):
        flat.copy_(torch.cat([p.grad.flatten() for p in bucket]))

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for handle, sums, bucket in zip(self.handles, self.flats, self.buckets, strict=True):
            handle.wait()
            sums /= dist.get_world_size()
            slices = sums.split([p.numel() for p in bucket])
            for parameter, values in zip(bucket, slices, strict=True):
                parameter.grad.copy_(values.view_as(parameter))
        self.begin_step()
