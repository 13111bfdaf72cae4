"""A weight that embeds ids and takes part in products too, as that of a language model's head.

`TiedFactors` computes norms and sums in PyTorch, `TiedTokens` on kernels, as is said here.

W [V, d] looks up ids and multiplies inputs a [B, T, d] into outputs, of which y [B, T, V] are the
gradients; e [B, S, d] are those of what ids [B, S] have looked up:

    G_i = L_i + E_i,   L_i = Σ_t y_it a_itᵀ,   E_i = Σ_s 1[id_is] e_isᵀ
    ‖G_i‖² = ‖L_i‖² + ‖E_i‖² + 2 x_i,   x_i = ⟨L_i, E_i⟩ = Σ_{t,s} y_it[id_is] (a_it · e_is)

G [B, V, d] is never formed. x takes T·S numbers of y and as many products of a and e. The sum is
that of the products and that of the look-ups, added up.

**Rounding.** The terms of ‖G_i‖² may cancel, so their errors are allowed for, each beside what it
is relative to: let X = Σ_{t,s} |y_t[id_s]| ‖a_t‖‖e_s‖ and S = Σ_t ‖a_t‖‖y_t‖. Sums over T tokens
and over S look-ups lose at most γ and δ of the sums of magnitudes; ε = 2⁻¹⁶.

- ‖E‖² is that of Ê, the rounded sums over equal tokens that are stored and summed, up to
  (ε + δ)‖E‖² of adding up squares. Row v of Ê − E is at most δ Σ ‖e_s‖ over its look-ups, so
  ⟨L, Ê − E⟩ is at most δX.
- ‖L‖² from Gram matrices is off by at most ε·S², and L is summed up to γ·S: see `clipping.norms`.
  Accumulated, it is that of a rounded L̂, up to ε‖L̂‖². Row v of L̂ − L is at most
  γ Σ_t |y_t[v]|‖a_t‖, so ⟨L̂ − L, E⟩ is at most γX. The sum accumulates the same products, in
  another launch: again up to γ·S.
- x is off by at most εX: |a_t · e_s| ≤ ‖a_t‖‖e_s‖ bounds what the chains of a matrix unit lose. For
  what underflow may take of a · e, ‖a_t‖ and ‖e_s‖ are made larger, as in `clipping.norms`.
- Coefficients times L and times E, and their addition, round by less than 2⁻²² (‖L‖ + ‖E‖).

So with n² = max(computed ‖G_i‖², 0) the norm of what is summed is at most

    √(n² + ε(‖L‖² or S²) + (ε + δ)‖E‖² + 2(ε + γ + δ)X) + γ·S + 2⁻²² (‖L‖ + ‖E‖)

and `Norm.scale` is that bound less n, so that no term is relative to more than it must be: S² is up
to T‖L‖², while X has of y only what was looked up.
"""

from operator import attrgetter

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import SUM_ROUNDING, wide_product
from dp_clipping.clipping.norms import GRAM_ROUNDING, LOST, Norm
from dp_clipping.kernels.coefficients import SortedCoefficients
from dp_clipping.kernels.embedding import Tokens, TokenSums, token_sums
from dp_clipping.kernels.gradient import gradient_and_squares
from dp_clipping.kernels.gram import gram_squares
from dp_clipping.kernels.weighted_product import weighted_product
from dp_clipping.layers.embedding.module import EmbeddingFactors
from dp_clipping.layers.projection import LinearFactors, inner_products
from dp_clipping.planning.cost_model import LONGEST_GRAM

ADDED = 2.0**-22  # what c times L, c times E and their sum lose
PAIRS = 1 << 21  # of tokens t and s, whose products are held at a time


class TiedFactors(LinearFactors):
    """Factors of a weight [V, d] that is in products too, as that of a language model's head.

    G of a few samples is formed at a time, normed, and summed, as of many tokens; `TiedTokens`
    forms none.

    Args:
        products: a [B, T, d], and output gradients y [B, T, V].
    """

    held = attrgetter("a", "y", "look_ups.ids", "look_ups.y")

    def __init__(self, products: LinearFactors, look_ups: EmbeddingFactors):
        super().__init__(products.a, products.y, products.transposed)
        self.look_ups, self.is_one_token, self.accumulates = look_ups, False, True

    def gradients(self, part: slice) -> Tensor:
        """Returns G of some samples."""
        gradients = super().gradients(part)
        sums, samples, tokens = self.look_ups.distinct()
        mine = (samples >= part.start) & (samples < part.stop)
        rows, own = (samples[mine] - part.start, tokens[mine]), sums[mine].to(gradients.dtype)
        return gradients.index_put_(rows, own, accumulate=True)

    def on_kernels(self) -> "TiedTokens":
        """Returns the same for the kernels, which form no G."""
        look_ups = self.look_ups
        tokens = Tokens(look_ups.ids, look_ups.y, look_ups.vocabulary)
        return TiedTokens(*self.operands, tokens)

    def only(self, good: Tensor) -> "TiedFactors":
        """Returns zeros for the samples that are not `good` [B]."""
        return TiedFactors(super().only(good), self.look_ups.only(good))


class TiedTokens:
    """Operands of one weight, from which kernels compute norms and sums.

    Args:
        y, a: of its products, [B, T, V] and [B, T, d].
        tokens: ids [B, S] and e [B, S, d] of its look-ups.
    """

    held = attrgetter("y", "a")  # nobody else has the sums of look-ups

    def __init__(self, y: Tensor, a: Tensor, tokens: Tokens):
        self.y, self.a, self._tokens = y, a, tokens
        self._sums: TokenSums | None = None

    def _sum_look_ups(self) -> TokenSums:
        """Returns the sums of each sample's equal tokens, which are kept in their place."""
        if self._sums is None:
            ((_, self._sums),) = token_sums([self._tokens], len(self.y))
            del self._tokens
        return self._sums

    def norm(self) -> Norm:
        """Returns ‖G_i‖² with a bound of its rounding: see above."""
        y, a = self.y, self.a
        tokens, outputs, inputs = y.shape[1], y.shape[2], a.shape[2]
        is_16_bit, is_short = y.element_size() == 2, tokens * (outputs + inputs) < outputs * inputs
        of_tokens = tokens * SUM_ROUNDING[torch.float32]
        if is_16_bit and is_short and tokens <= LONGEST_GRAM:
            (products,), (scale,) = (found.double() for found in gram_squares([(a, [y])]))
            relative_to = scale.square()
        else:
            if is_16_bit:  # 16 products at a time, cut off and not rounded
                of_tokens /= 8
            products = gradient_and_squares(y, a, store=False)[1].double()
            scale = (_token_norms(y) * _token_norms(a)).sum(1).double()
            relative_to = products
        across, magnitude = cross_terms(y, a, self._tokens.ids, self._tokens.y)
        of_look_ups = self._tokens.ids.shape[1] * SUM_ROUNDING[torch.float32]
        look_ups = self._sum_look_ups().squares[0].double()
        squared = products + look_ups + 2 * across
        allowed = GRAM_ROUNDING * (relative_to + look_ups + 2 * magnitude)
        allowed += of_look_ups * look_ups + 2 * (of_tokens + of_look_ups) * magnitude
        norm = squared.clamp_min(0).sqrt()
        error = (norm.square() + allowed).sqrt() - norm + of_tokens * scale
        error += ADDED * (products.clamp_min(0).sqrt() + look_ups.sqrt())
        return Norm(squared.float(), error.float(), 0.0, 1.0)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Returns Σ_i c_i G_i [V, d] float32, over the samples with c_i > 0; c [B] float32."""
        total = weighted_product(self.y, self.a, SortedCoefficients.of(coefficients))
        (of_look_ups,) = self._sum_look_ups().weighted_sums([0], coefficients[None], [0])
        return total.add_(of_look_ups)


def cross_terms(y: Tensor, a: Tensor, ids: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Σ_{t,s} y_it[id_is] (a_it · e_is), and X_i of magnitudes: [B] float64 each."""
    batch_size, tokens, _ = y.shape
    length = ids.shape[1]
    found = y.new_zeros(2, batch_size, dtype=torch.float64)
    samples = max(1, PAIRS // max(1, tokens * length))
    columns = max(1, PAIRS // max(1, tokens)) if samples == 1 else max(1, length)
    for i in range(0, batch_size, samples):
        part = slice(i, i + samples)
        own_y, own_a = y[part], a[part]
        for s in range(0, length, columns):
            places, own_e = ids[part, s : s + columns], e[part, s : s + columns]
            rows = own_y.gather(2, places[:, None].expand(-1, tokens, -1))
            products = inner_products(own_a, own_e)
            found[0, part] += (rows * products).sum((1, 2), dtype=torch.float64)
            of_a = wide_product(_token_norms(own_a)[:, None], rows.abs().float())
            found[1, part] += (of_a[:, 0] * _token_norms(own_e)).sum(1, dtype=torch.float64)
    return found[0], found[1]


def _token_norms(x: Tensor) -> Tensor:
    """Returns ‖x_it‖ [B, T] float32, plus what a product of two tokens may lose by underflow."""
    return torch.linalg.vector_norm(x, dim=2, dtype=torch.float32) + x.shape[2] ** 0.5 * LOST
