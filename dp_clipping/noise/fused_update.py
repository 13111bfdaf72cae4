"""Updates parameters in the kernel that adds the noise: `make_private(.., fused_step=True)`.

The noisy mean is rounded to the parameter's dtype, as `.grad` would be, and used in registers: it
is neither written nor read again, and noise is generated while the optimizer's state is loaded. The
reference is the plain way: `add_noise.add_noise_to_all`, and then the user's optimizer.

Sources: D. Kingma and J. Ba, Adam: a method for stochastic optimization (2015); I. Loshchilov and
F. Hutter, Decoupled weight decay regularization (2019), for AdamW; I. Sutskever et al., On the
importance of initialization and momentum in deep learning (2013), for Nesterov's momentum.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from dp_clipping.distributed.dtensor import local
from dp_clipping.noise import gaussian
from dp_clipping.torch_compat import add_to_each, gradient_hooks

STATES = {  # of each rule, in the optimizer's own names
    "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (), "momentum": ("momentum_buffer",), "nesterov": ("momentum_buffer",),
}  # fmt: skip
OTHERWISE = ("amsgrad", "maximize", "differentiable")  # options without a rule here
WITHOUT = "or leave out fused_step=True"


class Update(NamedTuple):
    """How the kernel updates one parameter.

    Attributes:
        rule: which code: `"adam"`, `"adamw"`, `"sgd"`, or SGD with `"momentum"` or `"nesterov"`.
        weight: this rank's part of the parameter, contiguous.
        states: tensors like it that the rule reads and writes: none, one or two.
        words: what follows the states' addresses in a row of the kernel's table.
    """

    rule: str
    weight: Tensor
    states: tuple[Tensor, ...]
    words: tuple[int, ...]

    def row(self, start: int = 0) -> list[int]:
        """Returns the row for elements from number `start` of the weight on."""
        addresses = [x.data_ptr() + start * x.element_size() for x in self.states]
        return [*addresses, *[0] * (2 - len(addresses)), *self.words]


def refuse(settings: Any, ranks: Any) -> None:
    """Raises ValueError, with an alternative, where the kernel cannot update the parameters."""
    optimizer, sharding = settings.optimizer, ranks.sharding
    parameters = [p for p in settings.module.parameters() if p.requires_grad]
    name = type(optimizer).__name__
    reasons = {
        "gradients that the wrapper divides among the ranks: give the network itself, or one that "
        "fully_shard has sharded": (
            hasattr(settings.module, "gradient_pieces")
            or (sharding is not None and bool(sharding.slices))
        ),
        f"{name}: use torch.optim.AdamW, Adam or SGD itself": (
            type(optimizer) not in (AdamW, Adam, SGD)
        ),
        f"{name} with {', '.join(OTHERWISE)}: leave these out": any(
            group.get(option) for group in optimizer.param_groups for option in OTHERWISE
        ),
        "hooks of Tensor.register_hook on parameters, which would see no gradient: remove them": (
            any(map(gradient_hooks, parameters))
        ),
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"fused_step=True is not for {reason}, {WITHOUT}")


def updates_of(
    optimizer: Optimizer, parameters: Sequence[Parameter], totals: Sequence[Tensor]
) -> list[Update | None]:
    """Returns how the kernel updates each parameter, and counts the step in the optimizer's state.

    None: the optimizer does it itself, because there is no state yet (in the first step), or for
    lack of a kernel, as without a GPU. With hooks before its step, which see the gradient, this is
    not called: see `PrivateOptimizer.has_step_hooks`.

    Args:
        totals: the sums of the parameters' gradients, in this rank's part of each.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    found: list[Update | None] = []
    steps: list[Tensor] = []
    for parameter, total in zip(parameters, totals, strict=True):
        group, state = groups[parameter], optimizer.state.get(parameter, {})
        rule, weight = _rule_of(optimizer, group), local(parameter.detach())
        names = STATES.get(rule, ())
        states = tuple(local(x) for n in names if isinstance(x := state.get(n), Tensor))
        numbers = group["lr"], state.get("step")
        if rule and len(states) == len(names) and _is_served(total, weight, states, numbers):
            found.append(Update(rule, weight, states, _words_of(group, rule, state)))
            steps += [state["step"]] if "step" in state else []
        else:
            found.append(None)
    if steps:
        add_to_each(steps, 1)
    return found


def _is_served(
    total: Tensor, weight: Tensor, states: tuple[Tensor, ...], numbers: tuple[Any, ...]
) -> bool:
    """Returns whether the kernel can update a weight with these states, and read these numbers."""
    return (
        gaussian.serves(total)
        and all(x.shape == total.shape for x in (weight, *states))
        and weight.dtype.itemsize <= total.dtype.itemsize
        and all(x.is_contiguous() and x.dtype == weight.dtype for x in (weight, *states))
        and not any(
            isinstance(x, Tensor)
            and x.is_cuda
            and (x.dtype, x.device) != (torch.float32, total.device)
            for x in numbers
        )
    )


def _rule_of(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Returns the rule by which a group is updated; empty: none here."""
    if any(group.get(option) for option in OTHERWISE):
        return ""
    if isinstance(optimizer, Adam):
        return "adamw" if group["decoupled_weight_decay"] else "adam"
    if not group["momentum"]:
        return "sgd"
    return "nesterov" if group["nesterov"] else "momentum"


def _words_of(group: dict[str, Any], rule: str, state: dict[str, Any]) -> tuple[int, ...]:
    """Returns the numbers of a rule: as bits of float64, and of tensors on the device the address.

    They are the number of the step, the learning rate, the weight decay, and of Adam the rates at
    which its states are kept, and ε; of SGD the momentum, 1 - dampening, and 0.
    """
    if rule.startswith("adam"):
        numbers = (*group["betas"], group["eps"])
    else:
        numbers = group["momentum"], 1 - group["dampening"], 0
    step = state.get("step", 0)
    if not (isinstance(step, Tensor) and step.is_cuda):
        step = float(step) + 1  # on the device it is read once it has been counted
    words = [word for x in (step, group["lr"]) for word in _address_and_bits(x)]
    return (*words, *(_bits(float(x)) for x in (group["weight_decay"], *numbers)))


def _address_and_bits(x: float | Tensor) -> tuple[int, int]:
    """Returns the address of a number on the device, or 0 and the number."""
    if isinstance(x, Tensor) and x.is_cuda:
        return x.data_ptr(), 0
    return 0, _bits(float(x))


def _bits(x: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", x))
    return bits
