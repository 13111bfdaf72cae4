"""The whole tensor goes round, W - 1 times: right, and too many bytes."""

import torch.distributed as dist

from tests.exercises.solutions import ring


def ring_all_reduce(tensor):
    passing = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        passing = ring.pass_on(passing, tensor)
        tensor += passing
