"""Maps tokens of packed sequences to those of padded ones, [T, N, ..]."""

from dataclasses import dataclass
from typing import Any

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
        times = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        columns = torch.arange(len(times)) - (sizes.cumsum(0) - sizes)[times]
        ends = (torch.arange(count)[:, None] < sizes).sum(1) - 1
        both = torch.stack([times, columns]).to(device, non_blocking=True)
        times, columns = both
        ends = ends.to(device, non_blocking=True)
        order, places = packed.sorted_indices, packed.unsorted_indices
        if order is not None:
            columns, ends = order[columns], ends[places]
        return cls(sizes, times * count + columns, ends, order, places)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns T and N."""
        return len(self.batch_sizes), len(self.ends)

    def pad(self, packed: Tensor) -> Tensor:
        """Returns [T, N, ..] of [tokens, ..], zero where a sequence has ended."""
        return Pad.apply(packed, self.tokens, self.shape)

    def pack(self, padded: Tensor) -> Tensor:
        """Returns the inverse of `pad`."""
        return Pack.apply(padded, self.tokens)

    def by_length(self, x: Tensor) -> Tensor:
        """Returns x [D, N, ..], in the order of the batch, by length."""
        return x if self.order is None else x.index_select(1, self.order)

    def by_batch(self, x: Tensor) -> Tensor:
        """Returns the inverse of `by_length`."""
        return x if self.places is None else x.index_select(1, self.places)

    def running(self) -> Tensor:
        """Returns which sequences run in each time step: [T, N, 1]."""
        times = torch.arange(len(self.batch_sizes), device=self.ends.device)
        return (times[:, None] <= self.ends)[..., None]


def _pad(packed: Tensor, tokens: Tensor, shape: tuple[int, int]) -> Tensor:
    padded = packed.new_zeros(shape[0] * shape[1], *packed.shape[1:])
    padded[tokens] = packed
    return padded.unflatten(0, shape)


class Pad(torch.autograd.Function):
    """Copies tokens to their places. Autograd's own backward of an index adds up, which is slow."""

    @staticmethod
    def forward(ctx, packed: Tensor, tokens: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.tokens = tokens
        return _pad(packed, tokens, shape).data

    @staticmethod
    def backward(ctx, gy: Any) -> Any:
        return gy.flatten(0, 1)[ctx.tokens], None, None


class Pack(torch.autograd.Function):
    """Copies tokens from their places."""

    @staticmethod
    def forward(ctx, padded: Tensor, tokens: Tensor) -> Tensor:
        ctx.tokens, ctx.shape = tokens, padded.shape[:2]
        return padded.flatten(0, 1)[tokens]

    @staticmethod
    def backward(ctx, gy: Any) -> Any:
        return _pad(gy, ctx.tokens, ctx.shape), None
