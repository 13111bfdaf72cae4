"""Reduces losses over each sample where code reduces over the batch."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

OF_CLASSES = (F.cross_entropy, F.nll_loss)
FUNCTIONS = (
    *OF_CLASSES, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip
SIGNATURES = {function: inspect.signature(function) for function in FUNCTIONS}


class PerSampleReductions(TorchFunctionMode):
    """A context in which losses of `torch.nn.functional` return one value per sample.

    The mean is over a sample's own entries: of `cross_entropy` over its targets that are not
    `ignore_index`, weighted by the weights of their classes if there are some; 0 without any.
    Inputs may be flattened, sample after sample: [B·T, V] beside targets [B·T]. What has another
    number of entries than a multiple of B is left as it is.

    Args:
        batch_size: called for B, the number of samples of the forward that runs.

    Attributes:
        count: reductions so far.
    """

    def __init__(self, batch_size: Callable[[], int]):
        super().__init__()
        self._batch_size = batch_size
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        signature = SIGNATURES.get(function)
        if signature is None:
            return function(*args, **(kwargs or {}))
        bound = signature.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        found = per_sample(function, bound.arguments, self._batch_size())
        if found is None:
            return function(*args, **(kwargs or {}))
        self.count += 1
        return found


def per_sample(function: Any, arguments: dict[str, Any], batch_size: int) -> Tensor | None:
    """Returns a loss [B]; None: it is not reduced, or its entries are not those of B samples.

    Args:
        function: one of `FUNCTIONS`.
        arguments: all of its arguments by name.
    """
    reduction = arguments["reduction"]
    if reduction not in ("mean", "sum") or arguments.get("size_average") is not None:
        return None
    losses = function(**{**arguments, "reduction": "none"})
    if not batch_size or losses.numel() % batch_size:
        return None
    total = losses.reshape(batch_size, -1).sum(1)
    if reduction == "sum":
        return total
    counted = _counted(function, arguments, losses).reshape(batch_size, -1).sum(1)
    return total / torch.where(counted > 0, counted, 1)


def _counted(function: Any, arguments: dict[str, Any], losses: Tensor) -> Tensor:
    """Returns how much each entry counts in a mean, in the shape of the losses."""
    target = arguments["target"]
    if function not in OF_CLASSES or target.is_floating_point():
        return torch.ones_like(losses)
    counts = target != arguments["ignore_index"]
    weight = arguments["weight"]
    if weight is None:
        return counts.to(losses.dtype)
    return weight[target.where(counts, 0)].to(losses.dtype) * counts
