"""Tries whether an optimizer treats every element alone, as one must that steps slices."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

NOT_ELEMENTWISE = (
    "{name} looks at whole tensors, at several together or at the loss, and here each rank steps a "
    "slice of every tensor{error}: use SGD, Adam, AdamW or another optimizer that treats every "
    'element alone, or a variant with whole gradients, as wrap("ddp_bucketed", module)'
)

IMPLEMENTATIONS = ("capturable", "foreach", "fused")
TRIALS = ((torch.float64, 1e-6), (torch.float32, 1e-3))  # the second, if the first one raises
TRIAL_STEPS = 32
TRIAL_SHAPES = ((129, 128), (4, 3, 2, 2), (16,), (2,))


def refuse_not_elementwise(
    make: Callable[..., Optimizer], settings: list[dict[str, Any]], name: str
) -> None:
    """Raises TypeError unless each element's step follows from its own gradients, by trying it.

    Args:
        make: makes an optimizer from parameter groups.
        settings: those of the groups.
        name: of the optimizer's class.
    """
    error = ""
    unlike = {"lr", "initial_lr", *IMPLEMENTATIONS}
    groups = [
        {key: value for key, value in group.items() if key not in unlike} for group in settings
    ]
    groups = list({repr(group): group for group in groups}.values())
    for dtype, tolerance in TRIALS:
        try:
            if _treats_elements_alone(make, groups, dtype, tolerance):
                return
            error = ""
            break
        except Exception as exception:  # wants matrices, sparse gradients, a closure
            error = f" (a trial ended in {type(exception).__name__}: {exception})"
    raise TypeError(NOT_ELEMENTWISE.format(name=name, error=error))


def _treats_elements_alone(
    make: Callable[..., Optimizer],
    groups: list[dict[str, Any]],
    dtype: torch.dtype,
    tolerance: float,
) -> bool:
    """Returns whether one optimizer of whole tensors steps as one optimizer for each part of them.

    What depends on several elements may show late, or with some gradients only. So there are many
    steps, and gradients that are large or small, persistent or orthogonal to the values, and in the
    end not finite. Numbers that an optimizer estimates are compared too, as their effect is small
    at first. One part's optimizer is told the loss.
    """

    def made(parameters: dict[int, list[Parameter]]) -> Optimizer:
        optimizer = make([{**own, "params": parameters.get(i, [])} for i, own in enumerate(groups)])
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # none, as a schedule may begin with, would show nothing
        if callable(train := getattr(optimizer, "train", None)):
            train()  # of a schedule-free optimizer
        return optimizer

    wholes = {i: [_trial_value(shape, dtype) for shape in TRIAL_SHAPES] for i in range(len(groups))}
    whole = made(wholes)
    parts = []
    for i, parameter in ((i, parameter) for i, held in wholes.items() for parameter in held):
        numel = parameter.numel()
        for place in (slice(5 * numel // 8), slice(5 * numel // 8, numel)):
            part = Parameter(parameter.detach().reshape(-1)[place].clone())
            parts.append((parameter, place, part, made({i: [part]})))
    takes_loss = "closure" in inspect.signature(whole.step).parameters
    for step in range(TRIAL_STEPS):
        before = {p: p.detach().clone() for held in wholes.values() for p in held}
        gradients = {p: _trial_gradient(p, i, step) for i, p in enumerate(before)}
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.clone()
        whole.step()
        estimates = _estimates(whole)
        told: Any = partial(torch.tensor, 10 ** (2 * math.sin(2.1 * step)))  # a loss
        for parameter, place, part, alone in parts:
            part.grad = gradients[parameter].reshape(-1)[place].clone()
            is_told = takes_loss and place.stop == 1  # which others are not
            alone.step(told) if is_told else alone.step()
            change = (parameter.detach() - before[parameter]).abs().nan_to_num(0.0, 0.0)
            limits = {
                "rtol": 1e4 * torch.finfo(dtype).eps, "atol": tolerance * change.max().item()
            }  # fmt: skip
            expected = parameter.detach().reshape(-1)[place]
            if not torch.allclose(part.detach(), expected, **limits, equal_nan=True):
                return False
            for key, value in () if is_told else _estimates(alone).items():
                if not math.isclose(value, estimates.get(key, value), rel_tol=tolerance):
                    return False
    return True


def _trial_value(shape: tuple[int, ...], dtype: torch.dtype) -> Parameter:
    return Parameter(1 + 0.5 * torch.arange(math.prod(shape), dtype=dtype).sin().view(shape))


def _trial_gradient(parameter: Parameter, number: int, step: int) -> Tensor:
    """Returns one of a size between 1e-4 and 1e4."""
    value = parameter.detach()
    place = torch.arange(value.numel(), dtype=value.dtype).view(value.shape)
    gradient = (0.7 * place).cos() + 0.3 * (1.3 * place + step).sin()
    if value.dim() > 1 and step % 4 == 2:
        rows, along = gradient.flatten(1), value.flatten(1)
        along = along / along.norm(dim=1, keepdim=True)
        gradient = (rows - (rows * along).sum(1, keepdim=True) * along).view(value.shape)
    gradient *= 10 ** (4 * math.sin(1.7 * number + 0.9 * step))
    if number == 0 and step == TRIAL_STEPS - 1:
        gradient.view(-1)[0] = math.inf
    return gradient


def _estimates(optimizer: Optimizer) -> dict[Any, float]:
    """Returns the numbers that an optimizer keeps for all its parameters, but for counts."""
    held = [(None, vars(optimizer)), *enumerate(optimizer.param_groups)]
    return {
        (number, key): float(value)
        for number, values in held
        for key, value in values.items()
        if isinstance(value, float)
        or (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point())
    }
