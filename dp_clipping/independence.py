"""Samples that see each other, found by changing the company of one.

The privacy of a sample rests on the others' gradients not depending on it. A network that centres
its inputs by the batch's mean, or a contrastive loss, breaks that, and no module's type tells. So
two samples are run alone and again beside a third: what the layers see of the two must not change.
For a loss it is its derivative: that of one sample's loss for another sample's outputs is zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture import Capture, tensors_in
from dp_clipping.layout import FEW, MORE, Layout
from dp_clipping.search import without_dropout

# Relative; kernels for another batch size round differently.
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
TOLERANCE = 1e-4
REPEATS = 8  # runs that must agree before a difference in training mode is not put down to chance

Seen = dict[str, list[Tensor | None]]


@torch.no_grad()
def check_network(capture: Capture, few: tuple[tuple, dict], more: tuple[tuple, dict]) -> None:
    """In evaluation mode, where nothing is random, with batches as for `Search.establish`.

    Then as the network is, in training, without dropout. Where it is random still (functional
    dropout) a difference there proves nothing.

    Raises:
        ValueError: naming the first layer, as registered, that sees a sample differently.
    """
    with _evaluating(capture.network):
        layer = _different(_seen(capture, few, FEW), _seen(capture, more, MORE))
    if layer is None:
        with without_dropout(capture.network):
            layer = _different_in_training(capture, few, more)
    if layer is not None:
        raise ValueError(
            f"what {layer or 'the network'} sees of a sample depends on the other samples of "
            "the batch (a mean over the batch, for example), so the sample has no gradient of "
            "its own; use statistics of the sample, or fixed ones"
        )


def _different_in_training(
    capture: Capture, few: tuple[tuple, dict], more: tuple[tuple, dict]
) -> str | None:
    first = _seen(capture, few, FEW)
    layer = _different(first, _seen(capture, more, MORE))
    if layer is None:
        return None
    repeated = (_seen(capture, few, FEW, skip=n) for n in range(1, REPEATS))
    is_random = any(_different(first, again) is not None for again in repeated)
    return None if is_random else layer


def _different(first: Seen, second: Seen) -> str | None:
    """The first layer that sees a sample differently."""
    for name, alone in first.items():
        beside = second[name]
        if len(alone) != len(beside) or not all(map(_same, alone, beside)):
            return name
    return None


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    try:
        network.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _seen(capture: Capture, arguments: tuple[tuple, dict], batch_size: int, skip: int = 0) -> Seen:
    """Layer -> a summary [FEW, 2] of each input that has samples; the network's outputs last.

    All runs draw the same random numbers, except that the first `skip` are left out.
    """
    args, kwargs = arguments
    seen: Seen = {handle.name: [] for handle in capture.handles}

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs = tensors_in((args, kwargs))
        layouts = module._private.layouts.get(tuple(x.dim() for x in inputs), ())
        for x, layout in zip(inputs, layouts, strict=False):
            if layout.kind != "shared":
                seen[module._private.name].append(_summary(x, layout, batch_size))

    with capture.looked_at(before):
        for _ in range(skip):
            torch.rand(())
            torch.rand((), device=capture.anchor.device)
        outputs = tensors_in(capture.network(*args, **kwargs))
    seen["the end of the network"] = [
        _summary(y, Layout("dimension", 0), batch_size) if y.shape[:1] == (batch_size,) else None
        for y in outputs
    ]
    return seen


def _summary(x: Tensor, layout: Layout, batch_size: int) -> Tensor:
    """Mean and norm of each of the first samples, and the tolerance that goes with them."""
    rows = layout.batch_first(x, batch_size)[:FEW].reshape(FEW, -1).double().nan_to_num(0, 0, 0)
    size = max(rows.shape[1], 1) ** 0.5
    tolerance = TOLERANCES.get(x.dtype, TOLERANCE)
    values = torch.stack((rows.sum(1) / size, rows.norm(dim=1)))
    return torch.cat((values, tolerance * values[1:]))


def _same(alone: Tensor | None, beside: Tensor | None) -> bool:
    """NaN and infinite values are zeros in a summary: a bad sample is not a mixing network."""
    if alone is None or beside is None:
        return True  # an output whose first dimension is not the batch
    return bool(((alone[:2] - beside[:2]).abs() <= alone[2]).all())


def check_losses(losses: Tensor, outputs: Any, batch_first: bool = True) -> None:
    """losses [B] of outputs whose first dimension is B samples, or B times a sample's rows.

    Where the first dimension is another one, all that can be told is that no entry of the outputs
    is in the losses of several samples.

    Raises:
        ValueError: if the first sample's loss depends on another sample's outputs.
    """
    if not (isinstance(outputs, Tensor) and outputs.requires_grad and outputs.dim()):
        return
    rows, rest = divmod(outputs.shape[0], len(losses))
    if (rest and batch_first) or not losses.requires_grad:
        return

    def used_by(part: Tensor) -> Tensor:
        """The entries of the outputs that these losses depend on."""
        (gradient,) = torch.autograd.grad(part, outputs, retain_graph=True, allow_unused=True)
        if gradient is None:
            return torch.zeros_like(outputs, dtype=torch.bool)
        return gradient.nan_to_num(0, 0, 0) != 0

    mine = used_by(losses[0])
    others = mine[rows:] if batch_first else mine & used_by(losses[1:].sum())
    if bool(others.any()):
        raise ValueError(
            "the loss of a sample depends on the outputs of other samples (a contrastive loss, a "
            "normalisation over the batch): per-sample gradients need a loss for each sample alone"
        )
