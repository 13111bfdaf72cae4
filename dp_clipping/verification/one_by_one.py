"""The definition of clipping on the user's own network: one ordinary backward per sample.

Sample i alone runs through the user's modules, not captured, and autograd gives g_i. If k examples
side by side are one unit of privacy, g_i is the sum of what autograd gives for each of them. Views
of an example are such examples, and g_i is divided by their number:

    n_ik = ‖g_ik‖ for clipping group k,    Σ_i c(n_ik) g_ik

with c(n) = min(1, C_k / n) (`abadi`, arXiv:1607.00133) or C_k / (n + γ) (`automatic`,
arXiv:2206.07136), in float64 and by nothing of `clipping` or `layers`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from dp_clipping.capture.samples import batch as samples
from dp_clipping.capture.samples.bags import Bags
from dp_clipping.capture.samples.batch import map_tensors
from dp_clipping.capture.samples.packed import opened, packed
from dp_clipping.clipping import accumulation
from dp_clipping.clipping.coefficients import registered
from dp_clipping.torch_compat import tree_leaves
from dp_clipping.trials.tolerances import ITEMSIZE

RUNS = 4  # number of samples, and of runs of each, that are compared to find randomness


@dataclass(frozen=True)
class Setting:
    """Settings of one sample's backward, and of the sum over samples.

    Attributes:
        losses_of: a batch -> losses [B], by the network in evaluation.
        batch: dimension 0 of its tensors counts samples (1 of inputs, without `batch_first`).
        size: number of samples, or examples.
        groups: trainable parameter -> number of its clipping group.
        clip_norms: C_k, [K] float64.
        function, gamma: of clipping, see `clipping.coefficients`.
        bags: those of the batch's tensors, by number, whose samples lie one after another.
        examples_per_unit: k, with views the rows of k examples.
        views: of an example.
    """

    losses_of: Callable[[Any], Tensor]
    batch: Any
    size: int
    batch_first: bool
    groups: dict[Parameter, int]
    clip_norms: Tensor
    function: str
    gamma: float
    bags: tuple[Bags, ...] = ()
    examples_per_unit: int = 1
    views: int = 1

    def sample(self, number: int) -> Any:
        """Returns one sample. A tensor without a dimension of B samples belongs to all of them."""

        def pick(x: Tensor) -> Tensor:
            candidates = (0,) if self.batch_first else (1, 0)
            dims = [d for d in candidates if d < x.dim() and x.shape[d] == self.size]
            return x.narrow(dims[0], number, 1) if dims else x

        tensors = tensors_of(self.batch, self.batch_first)
        places = iter(range(len(tensors)))
        of_bags: dict[int, Tensor] = {}
        for one in self.bags:
            rows = one.opened(tensors)
            of_bags |= one.closed({n: x[number : number + 1] for n, x in rows.items()})
        return changed(
            self.batch,
            lambda x: of_bags[n] if (n := next(places)) in of_bags else pick(x),
            self.batch_first,
        )

    def losses_of_sample(self, number: int) -> Tensor:
        """Returns the loss [1] of one sample, run alone and not compiled."""
        with torch.compiler.set_stance("force_eager"):
            losses = self.losses_of(self.sample(number))
        if losses.shape != (1,):
            raise ValueError(
                f"sample {number} alone has losses of shape {tuple(losses.shape)}: dimension 0 (of "
                "inputs 1, with batch_first=False) of every tensor in the batch must count samples"
            )
        return losses


@dataclass(frozen=True)
class Reference:
    """Norms and sums by the definition, in float64.

    Attributes:
        norms: [K, B].
        sums: parameter -> its clipped sum.
        scales: parameter -> Σ_i c_i ‖g_i‖, what its sum is of: rounding is relative to that.
        shortest: dtype of the shortest floating-point number that a sample was computed with.
    """

    norms: Tensor
    sums: dict[Parameter, Tensor]
    scales: dict[Parameter, float]
    shortest: torch.dtype


def one_by_one(setting: Setting) -> Reference:
    """Returns norms and clipped sums by the definition, one backward per sample."""
    clip_norms, parameters = setting.clip_norms, list(setting.groups)
    groups = torch.tensor(list(setting.groups.values()), device=clip_norms.device)
    sums = {p: torch.zeros_like(p, dtype=torch.float64) for p in parameters}
    scales = clip_norms.new_zeros(len(parameters))
    dtypes, each = _Dtypes(), setting.examples_per_unit
    norms = clip_norms.new_zeros(len(clip_norms), setting.size // each)
    for i in range(norms.shape[1]):
        gradients = [p.new_zeros(()) for p in parameters]
        for example in range(i * each, (i + 1) * each):
            with dtypes:
                losses = setting.losses_of_sample(example)
            with torch.autocast(clip_norms.device.type, enabled=False):
                loss = losses.sum() / setting.views
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradients = _added(gradients, found)
        lengths = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        squares = torch.stack(lengths).square()
        norms[:, i] = n = squares.new_zeros(len(clip_norms)).index_add(0, groups, squares).sqrt()
        if not n.isfinite().all():
            continue  # it contributes nothing
        c = _coefficients(n, setting)[groups]
        scales += c * torch.stack(lengths)
        for total, g, factor in zip(sums.values(), gradients, c.tolist(), strict=True):
            total.add_(g, alpha=factor)
    of_parameters = dict(zip(parameters, scales.tolist(), strict=True))
    return Reference(norms, sums, of_parameters, dtypes.shortest)


def _added(gradients: list[Tensor], found: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Returns gradients of a sample with those of one more of its examples; None is zero."""
    return [
        total if g is None else (total.double() + g if total.dim() == g.dim() else g)
        for total, g in zip(gradients, found, strict=True)
    ]


def _coefficients(norms: Tensor, setting: Setting) -> Tensor:
    """Returns c [K] of one sample."""
    if setting.function == "automatic":
        return setting.clip_norms / (norms + setting.gamma)
    if setting.function == "abadi":
        return (setting.clip_norms / norms).clamp(max=1)
    fn, _ = registered(setting.function)
    return torch.cat([fn(n, c) for n, c in zip(norms.split(1), setting.clip_norms, strict=True)])


class _Dtypes(TorchFunctionMode):
    """Notes the shortest floating-point dtype that operations inside return.

    Under autocast, inside the network or around it, that is another one than the parameters'.
    """

    shortest = torch.float64

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.shortest = min(self.shortest, x.dtype, key=ITEMSIZE)
        return result


def in_float64(network: nn.Module, setting: Setting) -> Reference | None:
    """Returns `one_by_one` of the network in float64; None if it cannot run there."""
    try:
        with accumulation.network_in_float64(network):
            return one_by_one(replace(setting, batch=changed(setting.batch, accumulation.doubled)))
    except (RuntimeError, TypeError, ValueError):  # say, a table or a cast in float32
        return None


def random_sample(setting: Setting, tolerance: float) -> int | None:
    """Returns the number of a sample whose loss differs between two runs; None if none does.

    Args:
        tolerance: relative difference that counts as rounding.
    """
    for i in range(min(RUNS, setting.size)):
        # Not under no_grad: autocast would cache weights without their gradients.
        runs = [setting.losses_of_sample(i).detach() for _ in range(RUNS)]
        losses = torch.cat(runs).double()
        if losses.amax() - losses.amin() > tolerance * losses.abs().amax():
            return i
    return None


def changed(batch: Any, change: Callable[[Tensor], Tensor], batch_first: bool = True) -> Any:
    """Returns the batch with every tensor changed; of packed sequences, those they are made of."""
    return packed(map_tensors(change, opened(batch, batch_first)), batch_first)


def tensors_of(batch: Any, batch_first: bool = True) -> list[Tensor]:
    """Returns a batch's tensors, in the order in which `changed` changes them."""
    return samples.tensors_of(opened(batch, batch_first))
