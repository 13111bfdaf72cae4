"""Buffers follow rank 0, also while autograd still needs the values they had."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.checks import in_messages
from ddp.torch_compat import own_buffers, version_of


class Buffers:
    """Keeps the buffers of `module` equal to those of rank 0 of `group`.

    Several forwards may precede one backward, and autograd may have saved a buffer in the first of
    them. It raises when a saved tensor was written to since, so a write must only count as one if
    it can change a value that was used:

    - A buffer that nobody has touched since the last broadcast, a table for instance, receives what
      it holds already. Writing through `.data` leaves autograd's count of writes alone. The running
      statistics of a batch norm are written in the same way; its backward does not use them.
    - A buffer that the network replaces by a new tensor in each forward is replaced here too: what
      autograd saved stays as it was.
    - A buffer that the network itself writes to is written to here, and counted.

    Rank 0 writes nothing.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup):
        self._module, self._group = module, group
        self._receives = dist.get_rank(group) != 0
        self._last: dict[int, tuple[Tensor, int]] = {}  # as the last broadcast left them
        self._remember(list(module.buffers()))

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every rank the values of rank 0; neighbours of one dtype share a message."""
        places = self._places()
        for message in in_messages([tensor for tensor, _ in places.values()]):
            flat = torch.cat([t.reshape(-1) for t in message])
            dist.broadcast(flat, group=self._group, group_src=0)
            if self._receives:
                parts = flat.split([t.numel() for t in message])
                for tensor, part in zip(message, parts, strict=True):
                    self._write(tensor, part.view(tensor.shape), places[id(tensor)][1])
        if self._receives:
            self._remember(list(self._module.buffers()))

    def _places(self) -> dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]]:
        """Each buffer once, and where in the network it is."""
        places: dict[int, tuple[Tensor, list]] = {}
        for owner in self._module.modules():
            for name, buffer in own_buffers(owner).items():
                if buffer is not None:
                    places.setdefault(id(buffer), (buffer, []))[1].append((owner, name))
        return places

    def _remember(self, buffers: list[Tensor]) -> None:
        self._last = {id(b): (b, version_of(b)) for b in buffers}

    def _write(self, buffer: Tensor, values: Tensor, places: list[tuple[nn.Module, str]]) -> None:
        if id(buffer) not in self._last:
            new = torch.empty_like(buffer).copy_(values)
            for owner, name in places:
                own_buffers(owner)[name] = new
        elif self._last[id(buffer)][1] == version_of(buffer):
            buffer.data.copy_(values)
        else:
            buffer.copy_(values)
