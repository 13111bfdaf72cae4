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


def cut(
    offsets: Sequence[int], numels: Sequence[int], slice_numel: int, ranks: int
) -> list[list[Piece]]:
    """Returns what each rank owns of parameters that begin at `offsets`, in the buffer's order.

    A parameter without elements belongs to one rank too, which has its state.
    """
    owned: list[list[Piece]] = [[] for _ in range(ranks)]
    for member, (first, numel) in enumerate(zip(offsets, numels, strict=True)):
        for rank in range(min(first // slice_numel, ranks - 1), ranks):
            low = rank * slice_numel
            begin, end = max(low, first), min(low + slice_numel, first + numel)
            if begin < end or not numel:
                owned[rank].append(Piece(member, begin - first, end - begin, begin - low))
            if first + numel <= low + slice_numel:
                break
    return owned
