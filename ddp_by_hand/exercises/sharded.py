"""Given to exercises 10 to 12: parameters in flat tensors that ranks divide, and a wrapper.

`Unit` is what exercise 10 builds, for some parameters of a network. `Sharded` has the methods by
which the benchmark clips gradients and compares them.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.torch_compat import all_gather


class Unit:
    """Parameters one behind the other in a flat tensor, padded so that the ranks divide it.

    Attributes:
        trained: the parameters, views of `values`.
        values: their values and the padding, [W n].
        own: this rank's slice of them, [n], what its optimizer steps; it requires a gradient.
    """

    def __init__(self, trained: Iterable[nn.Parameter]):
        self.trained = list(trained)
        self.values = self.flatten([p.detach() for p in self.trained])
        self.own = self.slice_of(self.values).requires_grad_()
        self.show(self.views(self.values))

    def flatten(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Returns a new flat tensor with one tensor for each parameter; None counts as zeros."""
        count = sum(p.numel() for p in self.trained)
        world_size = dist.get_world_size()
        flat = self.trained[0].new_zeros(-(-count // world_size) * world_size)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return flat.detach()

    def slice_of(self, flat: Tensor) -> Tensor:
        """Returns this rank's slice of a flat tensor, a view."""
        return flat.view(dist.get_world_size(), -1)[dist.get_rank()].detach()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a view of a flat tensor for each parameter, in its shape."""
        return views(self.trained, flat)

    def show(self, values: Sequence[Tensor]) -> None:
        """Gives the parameters these values, without a copy."""
        for parameter, value in zip(self.trained, values, strict=True):
            parameter.data = value


class GatheredUnit(Unit):
    """A unit whose whole values come and go. Exercise 12 writes how.

    Attributes:
        own: this rank's slice, in memory of its own.
    """

    def __init__(self, trained: Iterable[nn.Parameter]):
        super().__init__(trained)
        self.own = self.own.detach().clone().requires_grad_()

    def hide(self) -> None:
        """Makes the parameters NaN, in their shapes; each takes the memory of one element."""
        nothing = self.own.detach().new_full((), torch.nan)
        self.show([nothing.expand(p.shape) for p in self.trained])


def blocks_of(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Returns the members of all `nn.ModuleList`s, and the parameters in none of them."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    blocks = [block for members in lists for block in members]
    inside = {p for block in blocks for p in block.parameters()}
    return blocks, [p for p in module.parameters() if p not in inside]


def in_buckets(module: nn.Module, bucket_size_mb: float) -> list[list[nn.Parameter]]:
    """Groups trained parameters, last first, into buckets of at most this size; see exercise 4."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        if parameter.nbytes > room:
            buckets.append([])
            room = int(bucket_size_mb * (1 << 20))
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


class Sharded(nn.Module):
    """A wrapper whose `units` each have `trained` parameters and an `own` slice with a gradient."""

    units: Sequence["Unit | Sharded"]
    trained: list[nn.Parameter]
    own: Tensor

    @torch.no_grad()
    def whole_gradients(self) -> list[Tensor | None]:
        """Returns the mean gradients from all slices, in the order of parameters; a collective."""
        whole: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            flat = unit.own.new_empty(unit.own.numel() * dist.get_world_size())
            all_gather(flat, unit.own.grad, dist.group.WORLD).wait()
            whole |= zip(unit.trained, views(unit.trained, flat), strict=True)
        return [whole.get(parameter) for parameter in self.module.parameters()]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the norm over all slices of all ranks, and returns it; a collective."""
        square = torch.stack([unit.own.grad.square().sum() for unit in self.units]).sum()
        dist.all_reduce(square)
        for unit in self.units:
            unit.own.grad.mul_((max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))
        return square.sqrt()


def views(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    """Returns a view of a flat tensor for each parameter, in its shape; what follows is padding."""
    counts = [p.numel() for p in parameters]
    parts = flat[: sum(counts)].split(counts)
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
