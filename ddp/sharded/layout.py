"""How parameters lie in a flat buffer of which every rank owns one slice.

    flat buffer   | parameter 0 | parameter 1    | parameter 2 |pad|
    slices        | rank 0             | rank 1                    |

All slices are of one size, so that reduce-scatter and all-gather work on the buffer as it is. What
a rank owns of each parameter is a `Piece` (slices.py).
"""

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp.schedule import Bucket, lay_out


class FlatUnit(Bucket):
    """Parameters of one dtype that are reduced and gathered together, and this rank's part.

    They become views of it. It is the bucket of their gradients, of which `DividedGradients` sets
    `members`, and `nbytes` when it is sent.

    Args:
        itemsize: bytes of an element in the flat buffer; default: as of the parameters.

    Attributes:
        slice_numel: elements of a slice; `numel` includes the padding.
        values: a flat buffer with all values, [numel]; `value_views`: each parameter's place in it.
        shard: this rank's slice of the values, [slice_numel].
        gradient: this rank's slice of the reduced gradients, or None. What belongs to a parameter
            whose `.grad` is None has no meaning.
    """

    def __init__(self, parameters: list[Parameter], group: dist.ProcessGroup, itemsize: int = 0):
        self.parameters, self.group = parameters, group
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        itemsize = itemsize or self.parameters[0].element_size()
        self.shapes = [p.shape for p in self.parameters]
        self.offsets, end = lay_out([shape.numel() for shape in self.shapes], itemsize)
        _, self.slice_numel = lay_out([max(1, -(-end // ranks))], itemsize)
        self.numel = self.slice_numel * ranks
        self.gradient: Tensor | None = None
        self.values = self.parameters[0].detach().new_zeros(self.numel)
        self.value_views, self.shard = self.views(self.values), self.own(self.values)
        for view, parameter in zip(self.value_views, self.parameters, strict=True):
            parameter.data = view.copy_(parameter.detach())

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a view of `flat` [numel] for each parameter, in its shape."""
        return [
            flat.narrow(0, offset, shape.numel()).view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def own(self, flat: Tensor) -> Tensor:
        """Returns this rank's slice of `flat` [numel], a view [slice_numel]."""
        return flat.narrow(0, self.rank * self.slice_numel, self.slice_numel)
