"""Factors of a registered layer: its functions compute norms and clipped sums from them.

With `register_layer(cls, norm=, weighted_sum=)` no per-sample gradients are formed. Norms and sums
then come from two functions, so they are compared (`one_alone`): a sample's norm must be that of
the sum over this sample alone.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import Weights, accumulation_dtype
from dp_clipping.clipping.norms import Norm
from dp_clipping.torch_compat import version_of

SLACK = {torch.float32: 1e-5, torch.float64: 1e-10}
"""By how much of itself a sample's norm may be below that of what is summed."""

Results = Mapping[str, Tensor]


class LayerSums:
    """One call of a layer with its output's gradient: norms, and sums for any coefficients.

    Args:
        norm: () -> name -> ‖G_i‖ [B].
        weighted_sum: (coefficients [B], whether a sample counts [B]) -> name -> Σ_i c_i G_i
            [*parameter.shape].
        rows: B.
        gradient: the gradient of the output; only its device and dtype count.
        tensors: what the functions compute with.
    """

    def __init__(
        self,
        norm: Callable[[], Results],
        weighted_sum: Callable[[Tensor, Tensor], Results],
        rows: int,
        gradient: Tensor,
        tensors: tuple[Tensor, ...] = (),
    ):
        self._norm, self._weighted_sum = norm, weighted_sum
        self.rows, self.gradient, self.tensors = rows, gradient, tensors
        self._key: Any = None
        self._left: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Returns float32, or float64 for a gradient in that."""
        return accumulation_dtype(self.gradient.dtype)

    @property
    def slack(self) -> float:
        return SLACK[self.dtype]

    @cached_property
    def norms(self) -> Results:
        """Returns name -> ‖G_i‖ [B], computed once."""
        return self._norm()

    def sum_of(self, name: str, coefficients: Tensor, good: Tensor | None = None) -> Tensor:
        """Returns Σ_i c_i G_i of one parameter, over samples with c_i > 0 that are `good` [B].

        The function computes the sums of all parameters. Those of the others are kept until they
        are asked for, which they are next and with the same coefficients, or until some with other
        coefficients are.
        """
        key = coefficients.data_ptr(), version_of(coefficients), good
        if self._key != key or name not in self._left:
            counts = coefficients > 0
            counts = counts if good is None else counts & good
            self._left = dict(self._weighted_sum(coefficients, counts))
            self._key, self._held = key, coefficients  # held, so that no other has its address
        return self._left.pop(name).to(self.dtype)

    def rows_of(self, name: str, samples: Iterable[int], each: int = 1) -> Tensor:
        """Returns G of the given samples, each the sum of `each` rows: one call a sample."""
        found = []
        for i in samples:
            chosen = self.gradient.new_zeros(self.rows, dtype=torch.float32)
            chosen[i * each : (i + 1) * each] = 1
            found.append(self.sum_of(name, chosen))
        return torch.stack(found)


class NormAndSum:
    """Factors of one parameter of a registered layer, with the interface of other factors.

    Attributes:
        good: samples that are summed [B], None: all.
    """

    gradients = None
    held = attrgetter("sums.tensors")

    def __init__(self, sums: LayerSums, name: str, good: Tensor | None = None):
        self.sums, self.name, self.good = sums, name, good

    @property
    def y(self) -> Tensor:
        """Returns the output's gradient."""
        return self.sums.gradient

    def norm(self) -> Norm:
        """Returns ‖G_i‖², of which coefficients take `SLACK` more."""
        norms = self.sums.norms[self.name]
        squared, norms = (x.to(self.sums.dtype) for x in (norms.square(), norms))
        return Norm(squared, norms, 0.0, self.sums.slack)

    def on_kernels(self) -> "NormAndSum":
        return self

    def only(self, good: Tensor) -> "NormAndSum":
        """Returns the factors of the samples that are `good` [B], in the same shape."""
        return NormAndSum(self.sums, self.name, good)

    def dense(self) -> Tensor:
        """Returns G [B, *parameter], from one call of the user's function a sample."""
        return self.sums.rows_of(self.name, range(self.sums.rows))

    def weighted_sum(self, weights: Weights | Tensor) -> Tensor:
        """Returns Σ_i c_i G_i in float32 (float64), over the samples with c_i > 0."""
        c = weights.of_dtype(self.sums.dtype) if isinstance(weights, Weights) else weights
        return self.sums.sum_of(self.name, c, self.good)


def without(x: Tensor, good: Tensor) -> Tensor:
    """Returns x [B, ..] with rows of a good sample in place of those that are not `good` [B].

    Zeros would do for numbers, but a layer may have no gradient at them.
    """
    every = torch.arange(len(x), device=x.device)
    return x.index_select(0, torch.where(good, every, good.to(torch.uint8).argmax()))
