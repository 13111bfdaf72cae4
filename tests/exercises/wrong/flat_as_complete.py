"""A bucket is started when it is complete, whatever its place: each rank in its own order."""

import torch
import torch.distributed as dist

from tests.exercises.solutions import flat


class FlatDDP(flat.FlatDDP):
    @torch.no_grad()
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket, flat_tensor in zip(self.buckets, self.flats, strict=True):
            if any(p is parameter for p in bucket) and self.ready.issuperset(bucket):
                self.fill(flat_tensor, bucket)
                self.handles.append(dist.all_reduce(flat_tensor, async_op=True))
