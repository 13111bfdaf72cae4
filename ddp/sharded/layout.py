"""How parameters lie in a flat buffer of which every rank owns one slice.

    flat buffer   | parameter 0 | parameter 1    | parameter 2 |pad|
    slices        | rank 0             | rank 1                    |

All slices are of one size, so that reduce-scatter and all-gather work on the buffer as it is. They
are cut without regard to parameters: one may lie on several ranks, and a rank owns at most one run
of its elements, a `Piece`. Everything that a rank does with its part (step, noise, checkpoints)
goes through its pieces; the padding between them is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp.schedule import Bucket, lay_out
from ddp.torch_compat import all_gather


@dataclass(eq=False)
class Piece:
    """What a rank owns of a parameter: `numel` elements from `offset` on, counted flattened.

    In the rank's slice they begin at `start`.
    """

    parameter: Parameter
    offset: int
    numel: int
    start: int

    def of(self, own: Tensor) -> Tensor:
        """Returns this piece of a rank's slice, a view [numel]."""
        return own.narrow(0, self.start, self.numel)

    def of_parameter(self, whole: Tensor) -> Tensor:
        """Returns this piece of a contiguous tensor in the parameter's shape, a view [numel]."""
        return whole.view(-1).narrow(0, self.offset, self.numel)


class FlatUnit(Bucket):
    """Parameters of one dtype that are reduced and gathered together, and this rank's part.

    It is the bucket of their gradients, of which the wrapper sets `members` and `nbytes`.

    Args:
        itemsize: bytes of an element in the flat buffer; default: as of the parameters.

    Attributes:
        slice_numel: elements of a slice; `numel` includes the padding.
        pieces: what this rank owns, in the order of the parameters.
        values: a flat buffer with all values, [numel]; `value_views`: each parameter's place in it.
        shard: this rank's slice of the values, [slice_numel].
        gradient: this rank's slice of the reduced gradients, or None. What belongs to a parameter
            whose `.grad` is None has no meaning.
    """

    def __init__(
        self, parameters: Sequence[Parameter], group: dist.ProcessGroup, itemsize: int | None = None
    ):
        self.parameters, self.group = list(parameters), group
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        itemsize = itemsize or self.parameters[0].element_size()
        self.shapes = [p.shape for p in self.parameters]
        self.offsets, end = lay_out([shape.numel() for shape in self.shapes], itemsize)
        _, self.slice_numel = lay_out([max(1, -(-end // ranks))], itemsize)
        self.numel = self.slice_numel * ranks
        self.pieces = self._owned()
        self.gradient: Tensor | None = None
        self.values = self.parameters[0].detach().new_zeros(self.numel)
        self.value_views, self.shard = self.views(self.values), self.own(self.values)
        for view, parameter in zip(self.value_views, self.parameters, strict=True):
            view.copy_(parameter.detach())

    def _owned(self) -> list[Piece]:
        owned, low = [], self.rank * self.slice_numel
        for parameter, first in zip(self.parameters, self.offsets, strict=True):
            begin = max(low, first)
            numel = min(low + self.slice_numel, first + parameter.numel()) - begin
            if numel > 0:
                owned.append(Piece(parameter, begin - first, numel, begin - low))
            elif self.rank == 0 and parameter.numel() == 0:  # somebody has its state
                owned.append(Piece(parameter, 0, 0, 0))
        return owned

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a view of `flat` [numel] for each parameter, in its shape."""
        return [
            flat.narrow(0, offset, shape.numel()).view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def own(self, flat: Tensor) -> Tensor:
        """Returns this rank's slice of `flat` [numel], a view [slice_numel]."""
        return flat.narrow(0, self.rank * self.slice_numel, self.slice_numel)

    def gather(self, own: Tensor) -> list[Tensor]:
        """Returns whole tensors in the parameters' shapes from every rank's slice; a collective."""
        flat = own.new_empty(self.numel)
        all_gather(flat, own.contiguous(), self.group).wait()
        return self.views(flat)
