import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    chunks = tensor.view(-1).tensor_split(world_size)
    for k in range(world_size - 1):
        mine, theirs = chunks[(rank - k) % world_size], chunks[(rank - k - 1) % world_size]
        theirs += pass_on(mine, theirs)
    for k in range(world_size - 1):
        mine, theirs = chunks[(rank + 1 - k) % world_size], chunks[(rank - k) % world_size]
        theirs.copy_(pass_on(mine, theirs))


def pass_on(mine, theirs):
    """Send a chunk to the right while one arrives from the left."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    received = torch.empty_like(theirs)
    sending = dist.isend(mine, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    return received
