"""What the tests of sharded models share."""

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

WRAPS = ("leaf", "block", "root")


def shard_fsdp2(network: nn.Module, wrap: str, mesh, **options) -> nn.Module:
    """`fully_shard` on every layer with parameters, on every block, or on the root alone."""
    if wrap == "leaf":
        for module in network.modules():
            if module is not network and any(True for _ in module.parameters(recurse=False)):
                fully_shard(module, mesh=mesh, **options)
    elif wrap == "block":
        for block in network.blocks:
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def whole(x: Tensor) -> Tensor:
    """All of a DTensor, on every rank."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
