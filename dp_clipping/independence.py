"""Samples that see each other, found by changing the company of one.

The privacy of a sample rests on the others' gradients not depending on it. A network that centres
its inputs by the batch's mean, or a contrastive loss, breaks that, and no module's type tells. So
two samples are run alone and again beside a third: what the layers see of the two must not change.
For a loss it is its derivative: that of one sample's loss for another sample's outputs is zero.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture import Capture, tensors_in
from dp_clipping.layout import FEW, MORE, Layout

# Relative; kernels for another batch size round differently.
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
TOLERANCE = 1e-4


@torch.no_grad()
def check_network(capture: Capture, few: tuple[tuple, dict], more: tuple[tuple, dict]) -> None:
    """In evaluation mode, where nothing is random, with batches as for `Capture.establish`.

    Raises:
        ValueError: naming the first layer, as registered, that sees a sample differently.
    """
    first, second = (
        _seen(capture, *arguments, size) for arguments, size in ((few, FEW), (more, MORE))
    )
    for name, alone in first.items():
        if len(alone) != len(second[name]) or not all(map(_same, alone, second[name])):
            raise ValueError(
                f"what {name or 'the network'} sees of a sample depends on the other samples of "
                "the batch (a mean over the batch, for example), so the sample has no gradient of "
                "its own; use statistics of the sample, or fixed ones"
            )


def _seen(capture: Capture, args: tuple, kwargs: dict, batch_size: int) -> dict[str, list[Tensor]]:
    """Layer -> a summary [FEW, 2] of each input that has samples; the network's outputs last."""
    seen: dict[str, list[Tensor]] = {handle.name: [] for handle in capture.handles}

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs = tensors_in((args, kwargs))
        layouts = module._private.layouts.get(tuple(x.dim() for x in inputs), ())
        for x, layout in zip(inputs, layouts, strict=False):
            if layout.kind != "shared":
                seen[module._private.name].append(_summary(x, layout, batch_size))

    modes = [(module, module.training) for module in capture.network.modules()]
    try:
        capture.network.eval()
        with capture.looked_at(before):
            outputs = tensors_in(capture.network(*args, **kwargs))
    finally:
        for module, training in modes:
            module.training = training
    batched = [y for y in outputs if y.dim() and y.shape[0] == batch_size]
    last = "the end of the network"
    seen[last] = [_summary(y, Layout("dimension", 0), batch_size) for y in batched]
    return seen


def _summary(x: Tensor, layout: Layout, batch_size: int) -> Tensor:
    """Mean and norm of each of the first samples, and the tolerance that goes with them."""
    rows = layout.batch_first(x, batch_size)[:FEW].reshape(FEW, -1).double().nan_to_num(0, 0, 0)
    size = max(rows.shape[1], 1) ** 0.5
    tolerance = TOLERANCES.get(x.dtype, TOLERANCE)
    values = torch.stack((rows.sum(1) / size, rows.norm(dim=1)))
    return torch.cat((values, tolerance * values[1:]))


def _same(alone: Tensor, beside: Tensor) -> bool:
    """NaN and infinite values are zeros in a summary: a bad sample is not a mixing network."""
    return bool(((alone[:2] - beside[:2]).abs() <= alone[2]).all())


def check_losses(losses: Tensor, outputs: Any) -> None:
    """losses [B] of outputs whose first dimension is B samples, or B times a sample's rows.

    Raises:
        ValueError: if the first sample's loss depends on another sample's outputs.
    """
    if not (isinstance(outputs, Tensor) and outputs.requires_grad and outputs.dim()):
        return
    rows, rest = divmod(outputs.shape[0], len(losses))
    if rest or not losses.requires_grad:
        return
    (gradient,) = torch.autograd.grad(losses[0], outputs, retain_graph=True, allow_unused=True)
    if gradient is not None and bool(gradient[rows:].nan_to_num(0, 0, 0).any()):
        raise ValueError(
            "the loss of a sample depends on the outputs of other samples (a contrastive loss, a "
            "normalisation over the batch): per-sample gradients need a loss for each sample alone"
        )
