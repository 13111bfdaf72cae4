"""Factors of an embedding's use with ids [B, T]: norms and weighted sums of G.

Tokens that repeat within a sample add up before the norm is taken: the squared norm is the sum,
over the distinct tokens of the sample, of the squared norm of that sum.
"""

from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_clipping.clipping.accumulation import Weights, accumulation_dtype, only, squared_norms
from dp_clipping.clipping.norms import Norm
from dp_clipping.kernels.embedding import TokenSums
from dp_clipping.kernels.small_table import is_small, table_gradients
from dp_clipping.kernels.squared_norms import squared_norms as norms_on_kernels
from dp_clipping.layers.batch_layout import Layout


def batch_tokens(ids: Tensor, gy: Tensor, layout: Layout, batch_size: int) -> tuple[Tensor, Tensor]:
    """Returns ids [..] and gy [.., d] -> [B, T] and [B, T, d]."""
    width = gy.shape[-1]
    ids = layout.batch_first(ids, batch_size).reshape(batch_size, -1)
    gy = layout.batch_first(gy, batch_size).reshape(batch_size, -1, width)
    return ids, gy


def without_padding(ids: Tensor, gy: Tensor, padding_idx: int | None) -> Tensor:
    """Returns output gradients [B, T, d] with those of padding tokens zero: they train nothing."""
    if padding_idx is None:
        return gy
    return gy.masked_fill((ids == padding_idx).unsqueeze(-1), 0)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Returns `F.embedding`, of ids that all samples share with one look-up for all of them."""
    if ids.dim() > 1 and ids.stride(0) == 0 and len(ids) > 1:
        return (
            F.embedding(ids[0], weight)
            .expand(len(ids), *[-1] * ids.dim())
            .clone(memory_format=torch.contiguous_format)
        )
    return F.embedding(ids, weight)


@dataclass(frozen=True)
class TableGradients:
    """G [B, V, d] float32 of one use, summed like any stored per-sample gradient."""

    gradients: Tensor

    held = staticmethod(lambda _: ())  # nobody else has it
    may_be_recomputed = False
    nbytes = 0  # little beside what the forward holds

    @classmethod
    def of(cls, ids: Tensor, y: Tensor, vocabulary: int) -> "TableGradients":
        """Returns G of ids [B, T] and output gradients y [B, T, d]; see `table_gradients`."""
        return cls(table_gradients(ids, y, vocabulary))

    def take_norm(self, _keep: bool) -> Norm:
        """Returns ‖G_i‖² of exactly what is summed."""
        return Norm(norms_on_kernels(self.gradients.flatten(1)))

    def shaped(self, total: Tensor) -> Tensor:
        """Returns a sum [V, d] as the parameter has it."""
        return total


class EmbeddingFactors:
    """Factors of one use: ids [B, T], int32 or int64, y [B, T, d]."""

    held = attrgetter("ids", "y")

    def __init__(self, ids: Tensor, y: Tensor, vocabulary: int):
        self.ids, self.y, self.vocabulary = ids.long(), y, vocabulary
        self._sums: tuple[Tensor, Tensor] | None = None

    def norm(self, _grams: object = None) -> Norm:
        """Returns ‖G_i‖² of the sums over equal tokens, which are what `weighted_sum` adds."""
        sums, _ = self._distinct()
        return Norm(squared_norms(sums.view(len(self.ids), -1)))

    def _distinct(self) -> tuple[Tensor, Tensor]:
        """Sums [B·T, d] in `accumulation_dtype(dtype)` over equal tokens of a sample, and their
        tokens [B·T].

        Sorting a sample's ids numbers its distinct tokens without a table of the vocabulary's size;
        rows that no token has are zero.
        """
        if self._sums is None:
            batch_size, tokens = self.ids.shape
            ordered, order = self.ids.sort(dim=1)
            new = torch.ones_like(ordered, dtype=torch.bool)
            new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
            number = torch.empty_like(ordered).scatter_(1, order, new.long().cumsum(1) - 1)
            first = torch.arange(batch_size, device=number.device)[:, None] * tokens
            rows = (number + first).flatten()
            y = self.y.flatten(0, 1).to(accumulation_dtype(self.y.dtype))
            which = torch.zeros_like(rows).scatter_(0, rows, self.ids.flatten())
            self._sums = (y.new_zeros(y.shape).index_add_(0, rows, y), which)
        return self._sums

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Returns Σ_i c_i G_i [V, d] in `accumulation_dtype(dtype)`."""
        sums, which = self._distinct()
        c = weights.of_dtype(sums.dtype).repeat_interleave(self.ids.shape[1])[:, None]
        return sums.new_zeros(self.vocabulary, sums.shape[1]).index_add_(0, which, sums * c)

    def dense(self) -> Tensor:
        """Returns G [B, V, d] in `accumulation_dtype(dtype)`: the reference implementation."""
        batch_size, tokens = self.ids.shape
        y = self.y.to(accumulation_dtype(self.y.dtype))
        total = y.new_zeros(batch_size, self.vocabulary, y.shape[-1])
        sample = torch.arange(batch_size, device=y.device)[:, None].expand(batch_size, tokens)
        return total.index_put_((sample, self.ids), y, accumulate=True)

    def on_kernels(self) -> TokenSums | TableGradients:
        """Returns the sums over equal tokens, or G of a small table, formed on kernels."""
        if is_small(self.vocabulary, self.ids.shape[1]):
            return TableGradients.of(self.ids, self.y, self.vocabulary)
        return TokenSums.of(self.ids, self.y)

    def only(self, good: Tensor) -> "EmbeddingFactors":
        """Returns zeros for the samples that are not `good` [B]."""
        return EmbeddingFactors(self.ids, only(self.y, good), self.vocabulary)
