"""What must hold before the first step: every rank has the same model, and rank 0's values.

A data-parallel step averages tensors by position, so two ranks whose models differ would hang,
crash inside the collective library or, worst, mix gradients of different parameters. Each rank
therefore describes its model to all others once, and every rank raises the same error.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

MESSAGE_BYTES = 32 << 20  # tensors are flattened into messages of at most this size

Description = list[tuple[str, tuple[int, ...], str, bool]]


def check_same_model(module: nn.Module, group: dist.ProcessGroup, obstacle: str | None) -> None:
    """Compare names, shapes, dtypes and `requires_grad` of all parameters and buffers.

    Args:
        obstacle: why this rank cannot wrap the module, if it cannot.

    Raises:
        RuntimeError: on every rank of `group`, with the first rank's obstacle.
        ValueError: on every rank of `group`, naming the first tensor that differs from rank 0's
            and both shapes or dtypes.
    """
    obstacle = lazy_parameters(module) or obstacle
    mine = obstacle or describe(module)
    everyone: list[str | Description] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if obstacles := [theirs for theirs in everyone if isinstance(theirs, str)]:
        raise RuntimeError(obstacles[0])
    for rank, theirs in enumerate(everyone):
        difference = first_difference(everyone[0], theirs, rank)
        if difference:
            raise ValueError(f"the ranks hold different models: {difference}")


def lazy_parameters(module: nn.Module) -> str | None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            return (
                f"{name} has no shape yet, as in a lazy module before its first forward: run one "
                "batch through the network before it is wrapped"
            )
    return None


def describe(module: nn.Module) -> Description:
    """One entry a tensor, in registration order: (name, shape, dtype, trainable)."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]


def first_difference(reference: Description, other: Description, rank: int) -> str | None:
    for ours, theirs in zip(reference, other, strict=False):
        if ours != theirs:
            return f"{_show(ours)} on rank 0, {_show(theirs)} on rank {rank}"
    if len(reference) != len(other):
        longer = max(reference, other, key=len)
        extra = longer[min(len(reference), len(other))]
        owner = 0 if longer is reference else rank
        return f"{_show(extra)} exists on rank {owner} only (compared with rank {rank})"
    return None


def full_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """`{parameter: name}`, a tied parameter under all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {parameter: " = ".join(all_names) for parameter, all_names in names.items()}


def _show(entry: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, trainable = entry
    return f"{name} {list(shape)} {dtype}{'' if trainable else ' (frozen)'}"


@torch.no_grad()
def broadcast_from_rank_0(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` on every rank of `group` with those of its rank 0.

    Neighbours of one dtype share a message, so that many small buffers cost few launches.
    """
    for batch in in_messages([t.detach() for t in tensors]):
        if len(batch) == 1 and batch[0].is_contiguous():
            dist.broadcast(batch[0], group=group, group_src=0)
            continue
        flat = torch.cat([t.reshape(-1) for t in batch])
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, values in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def in_messages(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Cut `tensors` into lists of one dtype, each of at most `MESSAGE_BYTES` or of one tensor."""
    batches: list[list[torch.Tensor]] = []
    filled = 0
    for tensor in tensors:
        fits = batches and batches[-1][0].dtype == tensor.dtype
        if not fits or filled + tensor.nbytes > MESSAGE_BYTES:
            batches.append([])
            filled = 0
        batches[-1].append(tensor)
        filled += tensor.nbytes
    return batches
