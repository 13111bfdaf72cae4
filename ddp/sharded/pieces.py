"""Which elements of each parameter lie in a rank's slice of a flat buffer.

Slices are cut without regard to parameters: a parameter may lie on several ranks, and a rank owns
at most one run of elements of each, a `Piece`. Everything that a rank does with its part (step,
noise, checkpoints) goes through its pieces; the padding between them is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that one rank owns.

    Attributes:
        member: the parameter's position in the flat buffer.
        offset: the first element, counted in the flattened parameter.
        numel: number of elements.
        start: where they begin in the rank's slice.
    """

    member: int
    offset: int
    numel: int
    start: int

    def of(self, own: Tensor) -> Tensor:
        """Returns this piece of a rank's slice, a view [numel]."""
        return own.narrow(0, self.start, self.numel)

    def of_parameter(self, whole: Tensor) -> Tensor:
        """Returns this piece of a contiguous tensor in the parameter's shape, a view [numel]."""
        return whole.view(-1).narrow(0, self.offset, self.numel)


def pieces_of(
    rank: int, offsets: Sequence[int], numels: Sequence[int], slice_numel: int, ranks: int
) -> list[Piece]:
    """Returns what a rank owns of parameters that begin at `offsets`, in the buffer's order.

    A parameter without elements belongs to one rank too, which has its state.
    """
    owned, low = [], rank * slice_numel
    for member, (first, numel) in enumerate(zip(offsets, numels, strict=True)):
        begin, end = max(low, first), min(low + slice_numel, first + numel)
        if begin < end or (not numel and rank == min(first // slice_numel, ranks - 1)):
            owned.append(Piece(member, begin - first, end - begin, begin - low))
    return owned
