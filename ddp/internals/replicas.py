"""Makes all ranks have the same model, with the values of rank 0.

A data-parallel step averages tensors by position, so two ranks whose models differ would hang,
crash inside the collective library or, worst, mix gradients of different parameters. Each rank
therefore describes its model to all others once, and every rank raises the same error.
"""

from collections.abc import Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp.internals.ranks import told_by_all
from ddp.torch_compat import version_of

MESSAGE_BYTES = 32 << 20  # tensors are flattened into messages of at most this size

Description = list[tuple[str, tuple[int, ...], str, bool]]


class Replicas:
    """Keeps parameters (once) and buffers (in each forward) equal to those of rank 0 of `group`.

    Several forwards may precede one backward, and autograd may have saved a buffer in the first of
    them. It raises when a saved tensor was written to since, so a write must only count as one if
    it can change a value that was used:

    - A buffer that has not been written to since the last broadcast, such as a table, receives the
      values it holds already. Writing through `.data` leaves autograd's count of writes alone. The
      running statistics of a batch norm are written in the same way; its backward does not use
      them.
    - A buffer that the network replaces by a new tensor in each forward is replaced here too: what
      autograd saved stays as it was.
    - A buffer that the network itself writes to is written to here, and counted.

    Rank 0 writes nothing.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup):
        self._module, self._group = module, group
        self._last: dict[int, tuple[Tensor, int]] = {}  # buffers, and their versions

    def make_equal(self, obstacle: str | None) -> None:
        """Overwrites all parameters and buffers with those of rank 0.

        Before, names, shapes, dtypes and `requires_grad` are compared.

        Args:
            obstacle: why this rank cannot wrap the module, if it cannot.

        Raises:
            RuntimeError: on every rank, with the first rank's obstacle, or with nothing to train.
            ValueError: on every rank, naming the first tensor that differs from rank 0's and both
                shapes or dtypes.
        """
        mine = not_whole(self._module) or obstacle or describe(self._module)
        everyone = told_by_all(mine, self._group)
        if obstacles := [theirs for theirs in everyone if isinstance(theirs, str)]:
            raise RuntimeError(obstacles[0])
        for rank, theirs in enumerate(everyone):
            if difference := first_difference(everyone[0], theirs, rank):
                raise ValueError(f"the ranks hold different models: {difference}")
        if not any(requires_grad for *_, requires_grad in everyone[0]):
            raise RuntimeError("no parameter requires a gradient: there is nothing to synchronise")
        with torch.no_grad():
            tensors = [*self._module.parameters(), *self._module.buffers()]
            for message in in_messages([t.detach() for t in tensors]):
                if len(message) == 1 and message[0].is_contiguous():
                    dist.broadcast(message[0], group=self._group, group_src=0)
                    continue
                for tensor, values in zip(message, self._received(message), strict=True):
                    tensor.copy_(values)
        self._remember(self._module.buffers())

    @torch.no_grad()
    def broadcast_buffers(self, owners: list[dict[str, Tensor | None]]) -> None:
        """Overwrites buffers with rank 0's; `owners`: of each module, the dictionary of its own."""
        places: dict[int, list[tuple[dict, str]]] = {}  # of each buffer, where it is
        for own in owners:
            for name, buffer in own.items():
                places.setdefault(id(buffer), []).append((own, name))
        buffers = {id(b): b for own in owners for b in own.values() if b is not None}
        receives = dist.get_rank(self._group) != 0
        for message in in_messages(list(buffers.values())):
            received = self._received(message)
            if receives:
                for buffer, values in zip(message, received, strict=True):
                    self._write(buffer, values, places[id(buffer)])
        if receives:
            self._remember([b for own in owners for b in own.values() if b is not None])

    def _received(self, message: list[Tensor]) -> list[Tensor]:
        """Returns rank 0's values of tensors of one dtype, sent as one flat tensor."""
        flat = torch.cat([t.reshape(-1) for t in message])
        dist.broadcast(flat, group=self._group, group_src=0)
        parts = flat.split([t.numel() for t in message])
        return [part.view(t.shape) for t, part in zip(message, parts, strict=True)]

    def _remember(self, buffers: Iterable[Tensor]) -> None:
        self._last = {id(b): (b, version_of(b)) for b in buffers}

    def _write(self, buffer: Tensor, values: Tensor, places: list[tuple[dict, str]]) -> None:
        if id(buffer) not in self._last:
            new = torch.empty_like(buffer).copy_(values)
            for own, name in places:
                own[name] = new
        elif self._last[id(buffer)][1] == version_of(buffer):
            buffer.data.copy_(values)
        else:
            buffer.copy_(values)


def not_whole(module: nn.Module) -> str | None:
    """Returns a complaint about a tensor that has no values, or those of a part; else None."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            return (
                f"{name} has no shape yet, as in a lazy module before its first forward: run one "
                "batch through the network before it is wrapped"
            )
        if tensor.is_meta:
            return f"{name} is on the meta device: call network.to_empty(device=..), give it values"
        if hasattr(tensor, "placements"):
            return (
                f'{name} is a DTensor, as behind fully_shard(network): give wrap("torch_fsdp", '
                "network) a network before fully_shard, or train this one without wrap"
            )
        if hasattr(tensor, "full_name"):
            return (
                f"{name} has the memory of one element only, as the parameters of a network that "
                "fsdp has divided among ranks: build a new network and load the wrapper's "
                "state_dict() into it"
            )
        places = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and not stride for size, stride in places):
            return f"{name} has elements in one place, as of expand(): give it memory by clone()"
    return None


def describe(module: nn.Module) -> Description:
    """Returns one entry per tensor, in registration order: (name, shape, dtype, trainable)."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]


def first_difference(reference: Description, other: Description, rank: int) -> str | None:
    for ours, theirs in zip_longest(reference, other):
        if ours is None or theirs is None:
            extra, owner = (ours, 0) if theirs is None else (theirs, rank)
            return f"{_show(extra)} exists on rank {owner} only (compared with rank {rank})"
        if ours != theirs:
            return f"{_show(ours)} on rank 0, {_show(theirs)} on rank {rank}"
    return None


def _show(entry: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, trainable = entry
    return f"{name} {list(shape)} {dtype}{'' if trainable else ' (frozen)'}"


def in_messages(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Cuts `tensors` into lists of one dtype, each of at most `MESSAGE_BYTES` or of one tensor."""
    messages: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        fits = messages and messages[-1][0].dtype == tensor.dtype
        if not fits or filled + tensor.nbytes > MESSAGE_BYTES:
            messages.append([])
            filled = 0
        messages[-1].append(tensor)
        filled += tensor.nbytes
    return messages
