"""How a group of parameters lies in a flat buffer of which every rank owns one slice.

    flat buffer   | parameter 0 | parameter 1    | parameter 2 |pad|
    slices        | rank 0             | rank 1                    |

All slices are of one size, so that reduce-scatter and all-gather work on the buffer as it is. What
a rank owns of each parameter is a `Piece` (pieces.py).
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp.buckets import ALIGNMENT_BYTES, Bucket, Gradient, lay_out
from ddp.sharded.pieces import pieces_of
from ddp.torch_compat import all_gather


class FlatUnit(Bucket):
    """Parameters of one dtype that are reduced and gathered together, and this rank's part.

    It is the bucket of their gradients, of which the wrapper sets `members` and `nbytes`.

    Args:
        itemsize: bytes of an element in the flat buffer; default: as of the parameters.

    Attributes:
        shapes: of the parameters.
        slice_numel: elements of a slice; `numel` includes the padding.
        pieces: what this rank owns.
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
        numels = [shape.numel() for shape in self.shapes]
        bucket = lay_out(range(len(numels)), [Gradient(n, "", itemsize) for n in numels])
        unit = max(1, ALIGNMENT_BYTES // itemsize) * ranks
        self.offsets, self.numel = bucket.offsets, -(-max(bucket.numel, 1) // unit) * unit
        self.slice_numel = self.numel // ranks
        self.pieces = pieces_of(self.rank, self.offsets, numels, self.slice_numel, ranks)
        self.gradient: Tensor | None = None
        first = self.parameters[0].detach()
        self.values = first.new_zeros(self.numel)
        self.value_views, self.shard = self.views(self.values), self.own(self.values)
        for view, parameter in zip(self.value_views, self.parameters, strict=True):
            view.copy_(parameter.detach())

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
