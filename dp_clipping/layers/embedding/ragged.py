"""Factors of a use in which samples have different numbers of tokens, concatenated.

The tokens of all samples are the rows of one tensor, [N, d], and another one, [N], says whose each
row is. No row is added to make samples as long as the longest one.
"""

from operator import attrgetter

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import Weights, accumulation_dtype, only, squared_norms
from dp_clipping.clipping.norms import Norm
from dp_clipping.kernels.embedding import TokenSums


class RaggedFactors:
    """Factors of one use of an embedding: ids [N], samples [N] in ascending order, y [N, d]."""

    held = attrgetter("ids", "samples", "y")

    def __init__(self, ids: Tensor, samples: Tensor, y: Tensor, batch_size: int, vocabulary: int):
        self.ids, self.samples, self.y = ids.long(), samples, y
        self.batch_size, self.vocabulary = batch_size, vocabulary
        self._sums: tuple[Tensor, Tensor] | None = None

    def norm(self, _grams: object = None) -> Norm:
        """Returns ‖G_i‖² of the sums over equal tokens, which are what `weighted_sum` adds."""
        sums, keys = self._distinct()
        squares = squared_norms(sums)
        total = squares.new_zeros(self.batch_size, dtype=torch.float64)
        total.index_add_(0, keys // self.vocabulary, squares.double())
        return Norm(total.to(squares.dtype))

    def _distinct(self) -> tuple[Tensor, Tensor]:
        """Returns sums [N, d] in `accumulation_dtype(dtype)` over equal tokens of a sample, and
        which they are [N], as sample · V + token.

        Rows behind the last of these sums are zero.
        """
        if self._sums is None:
            keys = self.samples * self.vocabulary + self.ids
            ordered, order = keys.sort()
            new = torch.ones_like(ordered)
            new[1:] = ordered[1:] != ordered[:-1]
            rows = torch.empty_like(order).scatter_(0, order, new.cumsum(0) - 1)
            y = self.y.to(accumulation_dtype(self.y.dtype))
            which = torch.zeros_like(keys).scatter_(0, rows, keys)
            self._sums = (y.new_zeros(y.shape).index_add_(0, rows, y), which)
        return self._sums

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Returns Σ_i c_i G_i [V, d] in `accumulation_dtype(dtype)`."""
        sums, keys = self._distinct()
        c = weights.of_dtype(sums.dtype)[keys // self.vocabulary][:, None]
        total = sums.new_zeros(self.vocabulary, sums.shape[1])
        return total.index_add_(0, keys % self.vocabulary, sums * c)

    def dense(self) -> Tensor:
        """Returns G [B, V, d] in `accumulation_dtype(dtype)`: the reference implementation."""
        y = self.y.to(accumulation_dtype(self.y.dtype))
        total = y.new_zeros(self.batch_size, self.vocabulary, y.shape[-1])
        return total.index_put_((self.samples, self.ids), y, accumulate=True)

    def on_kernels(self) -> TokenSums:
        """Returns the sums over equal tokens, formed on kernels."""
        return TokenSums.of_rows(self.ids, self.samples, self.y, self.batch_size)

    def only(self, good: Tensor) -> "RaggedFactors":
        """Returns zeros for the samples that are not `good` [B]."""
        y = only(self.y, good[self.samples])
        return RaggedFactors(self.ids, self.samples, y, self.batch_size, self.vocabulary)
