"""Maps tokens of packed sequences to those of padded ones, [T, N, ..]."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Packing:
    """The shape of a packed sequence.

    Attributes:
        batch_sizes: [T] on the host; see `PackedSequence`.
        tokens: [tokens], of each packed token t·N + n, with n in the order of the batch.
        ends: [N], the last time step of each sequence, in that order.
        order, places: the batch's sequences by length, and its inverse; None: as they are.
    """

    batch_sizes: Tensor
    tokens: Tensor
    ends: Tensor
    order: Tensor | None
    places: Tensor | None

    @classmethod
    def of(cls, packed: PackedSequence) -> "Packing":
        sizes, device = packed.batch_sizes, packed.data.device
        count = int(sizes[0])
        times = torch.repeat_interleave(torch.arange(sizes.shape[0], device="cpu"), sizes)
        columns = torch.arange(times.shape[0], device="cpu") - (sizes.cumsum(0) - sizes)[times]
        ends = (torch.arange(count, device="cpu")[:, None] < sizes).sum(1) - 1
        both = torch.stack([times, columns]).to(device, non_blocking=True)
        times, columns = both.unbind()
        ends = ends.to(device, non_blocking=True)
        order, places = packed.sorted_indices, packed.unsorted_indices
        if order is not None:
            columns, ends = order[columns], ends[places]
        return cls(sizes, times * count + columns, ends, order, places)

    def pad(self, packed: Tensor) -> Tensor:
        """Returns [T, N, ..] of [tokens, ..], zero where a sequence has ended."""
        times, count = self.batch_sizes.shape[0], self.ends.shape[0]
        padded = packed.new_zeros(times * count, *packed.shape[1:])
        return padded.index_copy(0, self.tokens, packed).view(times, count, *packed.shape[1:])

    def pack(self, padded: Tensor) -> Tensor:
        """Returns the inverse of `pad`."""
        return padded.flatten(0, 1).index_select(0, self.tokens)

    def last_tokens(self) -> tuple[Tensor, Tensor]:
        """Returns the time step [N] of each sequence's last token, and the sequence [N]."""
        return self.ends, torch.arange(len(self.ends), device=self.ends.device)

    def running(self) -> Tensor:
        """Returns which sequences run in each time step: [T, N, 1]."""
        times = torch.arange(len(self.batch_sizes), device=self.ends.device)
        return (times[:, None] <= self.ends)[..., None]


def reordered(states: Iterable[Tensor], order: Tensor | None) -> list[Tensor]:
    """Returns states [D, N, ..] with the sequences in this order; None: as they are."""
    return [x if order is None else x.index_select(1, order) for x in states]
