"""Embeddings: y = W[ids], so row v of G_i is the sum of output gradients of sample i's tokens v.

Tokens that repeat within a sample add up before the norm is taken: the squared norm is the sum,
over the distinct tokens of the sample, of the squared norm of that sum.

In a region that `torch.compile` traces, ids and output gradients are the gradients of slots, as
`layers.linear` explains.
"""

from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import (
    Weights,
    accumulation_dtype,
    only,
    squared_norms,
)
from dp_clipping.clipping.norms import Norm
from dp_clipping.kernels.embedding import Tokens
from dp_clipping.kernels.small_table import is_small, table_gradients
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, forward_of
from dp_clipping.layers.recorder import CHANGED, FACTORS, LOOK_UP_SLOTS

SETTINGS = attrgetter("padding_idx")


def _first_call(self: nn.Embedding, handle: LayerState, ids: Tensor) -> Tensor:
    weight = self.weight
    call, padding_idx = tensor_parallel.embedding(handle, ids, weight, self.padding_idx)
    layout, ids = handle.batched(call.x)
    if torch.compiler.is_compiling():
        return call.leave(_run_compiled(handle, ids, call.weight.detach(), layout, padding_idx))
    given = call.x if call.mesh is None else None
    own = (call.weight, None)
    return call.leave(handle.run(Embedding, self, ids, layout, *own, padding_idx, SETTINGS, given))


forward = forward_of("embedding", _first_call)


def _run_compiled(
    handle: LayerState, ids: Tensor, weight: Tensor, layout: Layout, padding_idx: int | None
) -> Tensor:
    rest = (None, (layout.kind, layout.dim, handle.private_step.batch_size), padding_idx)
    if "count" not in handle.slots:  # weights that are used several times, or plain arithmetic
        return Embedding.apply(ids, weight, handle.slot("weight"), None, None, rest)
    y, tokens, count = (handle.slots[name] for name in LOOK_UP_SLOTS)
    if y.dtype != weight.dtype:
        raise ValueError(f"{handle.name} is given another dtype {CHANGED}")
    if tokens.numel() != ids.numel():
        raise ValueError(f"{handle.name} is given another number of tokens {CHANGED}")
    return Embedding.apply(ids, weight, y, tokens, count, rest)


class Embedding(torch.autograd.Function):
    """Runs `F.embedding`; its backward leaves ids and output gradients.

    `rest` has the site, the private step and the padding's id. In a compiled region it has None and
    where samples are: there backward returns the gradients of slots. Those are output gradients,
    ids and a count of 1, or G [B, V, d] alone where `tokens` is None.
    """

    @staticmethod
    def forward(ctx, ids, weight, first, tokens, count, rest):
        ctx.save_for_backward(ids)
        ctx.rest, ctx.vocabulary, ctx.slots = rest, weight.shape[0], None
        if rest[0] is None:
            ctx.slots = first.dtype, None if tokens is None else tokens.dtype
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gy):
        (ids,) = ctx.saved_tensors
        site, private_step, padding_idx = ctx.rest
        if site is None:
            kind, dim, batch_size = private_step
            layout = Layout(kind, dim)
        else:
            layout, batch_size = site.layout, private_step.batch_size
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        ids, gy = by_sample(ids, gy, layout, batch_size)
        gy = without_padding(ids, gy, padding_idx)
        if site is None:
            dtype, of_tokens = ctx.slots
            if of_tokens is None:
                gradients = EmbeddingFactors(ids, gy, ctx.vocabulary).dense().to(dtype)
                return None, None, gradients, None, None, None
            one = gy.new_ones(1, dtype=torch.float32)
            return None, None, gy, ids.to(of_tokens), one, None
        factors = EmbeddingFactors(ids, gy, ctx.vocabulary)
        private_step.take(FACTORS, site.records, factors, factors.held(factors))
        return None, None, None, None, None, None


def without_padding(ids: Tensor, gy: Tensor, padding_idx: int | None) -> Tensor:
    """Returns output gradients [B, T, d] with those of padding tokens zero: they train nothing."""
    if padding_idx is None:
        return gy
    return gy.masked_fill((ids == padding_idx).unsqueeze(-1), 0)


def by_sample(
    ids: Tensor, y: Tensor, layout: Layout | None, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Returns ids [B, T] and output gradients [B, T, d], of ids [..] and y [.., d].

    Args:
        layout: where their samples are; None: in the first dimension.
    """
    if layout is not None:
        ids, y = layout.batch_first(ids, batch_size), layout.batch_first(y, batch_size)
    if ids.ndim != 2 or ids.shape[0] != batch_size:
        ids, y = ids.reshape(batch_size, -1), y.reshape(batch_size, -1, y.shape[-1])
    return ids, y


class EmbeddingFactors:
    """Factors of one use: ids, int32 or int64, and output gradients y.

    Args:
        ids, y: [B, T] and [B, T, d]. Where samples have different numbers of tokens, these are
            laid behind each other, [N] and [N, d]: no row makes them as long as the longest.
        samples: [N], whose each of those is, ascending; `batch_size` is B.
    """

    held = attrgetter("ids", "y")

    def __init__(
        self, ids: Tensor, y: Tensor, vocabulary: int, samples: Tensor | None = None,
        batch_size: int = 0,
    ):  # fmt: skip
        self.ids, self.y, self.vocabulary = ids.long(), y, vocabulary
        self.samples = samples
        self.batch_size = ids.shape[0] if samples is None else batch_size
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def norm(self) -> Norm:
        """Returns ‖G_i‖² of the sums over equal tokens, which are what `weighted_sum` adds."""
        sums, samples, _ = self.distinct()
        squares = squared_norms(sums)
        total = squares.new_zeros(self.batch_size, dtype=torch.float64)
        total.index_add_(0, samples, squares.double())
        return Norm(total.to(squares.dtype))

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns samples [N], ids [N] and y [N, d] of all tokens, y in the accumulation dtype."""
        ids, y = self.ids.flatten(), self.y.reshape(-1, self.y.shape[-1])
        samples = self.samples
        if samples is None:
            samples = torch.arange(self.batch_size, device=ids.device)[:, None]
            samples = samples.expand(self.ids.shape).flatten()
        return samples, ids, y.to(accumulation_dtype(y.dtype))

    def distinct(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sums [N, d] in `accumulation_dtype(dtype)` over equal tokens of a sample, and
        of which sample [N] and token [N] they are.

        Sorting numbers the distinct tokens without a table of the vocabulary's size. Rows behind
        the last of these sums are zero.
        """
        if self._sums is None:
            samples, ids, y = self._rows()
            keys = samples * self.vocabulary + ids
            ordered, order = keys.sort()
            new = torch.ones_like(ordered)
            new[1:] = ordered[1:] != ordered[:-1]
            rows = torch.empty_like(order).scatter_(0, order, new.cumsum(0) - 1)
            which = torch.zeros_like(keys).scatter_(0, rows, keys)
            of_sample = which.div(self.vocabulary, rounding_mode="floor")
            sums = y.new_zeros(y.shape).index_add_(0, rows, y)
            self._sums = sums, of_sample, which - of_sample * self.vocabulary
        return self._sums

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Returns Σ_i c_i G_i [V, d] in `accumulation_dtype(dtype)`."""
        sums, samples, tokens = self.distinct()
        c = weights.of_dtype(sums.dtype)[samples][:, None]
        total = sums.new_zeros(self.vocabulary, sums.shape[1])
        return total.index_add_(0, tokens, sums * c)

    def dense(self) -> Tensor:
        """Returns G [B, V, d] in `accumulation_dtype(dtype)`: the reference implementation."""
        samples, ids, y = self._rows()
        total = y.new_zeros(self.batch_size, self.vocabulary, y.shape[-1])
        return total.index_put_((samples, ids), y, accumulate=True)

    def add_to(self, gradients: Tensor) -> None:
        """Adds G to gradients [B, V, d], in place."""
        sums, samples, tokens = self.distinct()
        gradients.index_put_((samples, tokens), sums.to(gradients.dtype), accumulate=True)

    def on_kernels(self) -> Tokens | Tensor:
        """Returns the tokens for the kernels, or G [B, V, d] float32 of a small table."""
        if self.samples is not None:
            return Tokens(self.ids[:, None], self.y[:, None], self.vocabulary, self.samples)
        if is_small(self.vocabulary, self.ids.shape[1]):
            return table_gradients(self.ids, self.y, self.vocabulary)
        return Tokens(self.ids, self.y, self.vocabulary)

    def only(self, good: Tensor) -> "EmbeddingFactors":
        """Returns zeros for the samples that are not `good` [B]."""
        y = only(self.y, good if self.samples is None else good[self.samples])
        return EmbeddingFactors(self.ids, y, self.vocabulary, self.samples, self.batch_size)
