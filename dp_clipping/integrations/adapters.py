"""Refuses adapters that the loss does not reach, whose parameters would get noise alone."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

UNREACHED = (
    "the loss has no gradient for {names}, which would get noise and nothing else: freeze them, "
    "p.requires_grad_(False), or let the loss use them (of a PEFT model: "
    'model.set_adapter("..") activates an adapter, model.enable_adapter_layers() all)'
)
FROZEN = (
    'of the active adapter {names} are frozen and will not move: model.set_adapter(".."), or '
    "LoraConfig(inference_mode=False), trains it"
)
STILL = (
    "{names} have not moved in {steps} steps: is the learning rate 0, or did a scheduler leave it "
    "there? TrainingArguments(learning_rate=1e-3, ..)"
)


def adapters_of(model: Any) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters of a model with PEFT adapters; of another one, none."""
    own = model.named_parameters() if hasattr(model, "peft_config") else ()
    return {name: p for name, p in own if p.requires_grad}


def refuse_unreached(model: Any, loss: Callable[[], Tensor]) -> None:
    """Checks that the loss of a sample reaches each adapter; accumulates no gradient.

    Warns of modules whose active adapter is frozen as a whole.

    Raises:
        ValueError: it does not reach one; the message names it.
    """
    adapters = adapters_of(model)
    if not adapters:
        return
    if frozen := _frozen(model):
        warnings.warn(FROZEN.format(names=_some(frozen)), stacklevel=2)
    total = loss()
    found: Any = [None] * len(adapters)
    if total.requires_grad:
        found = torch.autograd.grad(total, list(adapters.values()), allow_unused=True)
    missing = [name for name, g in zip(adapters, found, strict=True) if g is None]
    if missing:
        raise ValueError(UNREACHED.format(names=_some(missing)))


def warn_of_still(before: dict[str, Tensor], model: Any, steps: int) -> None:
    """Warns of adapters that `steps` steps have not changed."""
    now = adapters_of(model)
    still = [name for name, x in before.items() if name in now and torch.equal(x, now[name])]
    if still and steps:
        warnings.warn(STILL.format(names=_some(still), steps=steps), stacklevel=3)


def _frozen(model: Any) -> list[str]:
    """Returns the modules whose active adapters are frozen as a whole."""
    active = set(getattr(model, "active_adapters", ()))
    trained: dict[str, bool] = {}
    for name, p in model.named_parameters():
        module, _, rest = name.partition(".lora_")
        if rest and active & set(rest.split(".")):
            trained[module] = trained.get(module, False) or p.requires_grad
    return [module for module, is_trained in trained.items() if not is_trained]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
