"""Calls users' hooks on parameters with the gradient that the optimizer applies.

In private training autograd computes no gradient of a parameter, and checks compute gradients of
single samples. `make_private` takes hooks of `Tensor.register_hook` off the parameters, and each
step calls them once, after its noise. What they return is post-processing and costs no ε: a
projection of the gradient is one of its noise too.
"""

from typing import Any

import torch
from torch.nn import Parameter

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.torch_compat import gradient_hooks, set_gradient_hooks

INSTEAD = "change .grad between optimizer.pre_step() and optimizer.step()"


class GradientHooks:
    """Users' hooks on the trainable parameters of one private model.

    Args:
        capture: the model's parameters.
        is_wrapped: a data-parallel wrapper may have hooks on them too.
        is_divided: `.grad` of a rank is a part of the gradient.

    Attributes:
        taken: the hooks of each parameter that had some.

    Raises:
        ValueError: for a hook that would see a part of the gradient, or would not be called.
    """

    def __init__(self, capture: CapturedNetwork, is_wrapped: bool, is_divided: bool):
        self._capture = capture
        hooked = list(filter(gradient_hooks, capture.parameters))
        if hooked and is_divided:
            raise ValueError(
                f"{self._names(hooked)} has a hook of Tensor.register_hook, which would be called "
                f"with this rank's part of the gradient: remove it, and {INSTEAD}"
            )
        counts = map(len, capture.hooks_after_accumulation(is_wrapped))
        if found := [p for p, n in zip(capture.parameters, counts, strict=False) if n]:
            raise ValueError(
                f"{self._names(found)} has a hook of register_post_accumulate_grad_hook, which is "
                "not called in private training, where autograd accumulates nothing: use "
                f"Tensor.register_hook, which is called with the noisy gradient, or {INSTEAD}"
            )
        self.taken: dict[Parameter, dict[int, Any]] = {p: gradient_hooks(p) for p in hooked}
        for parameter in hooked:
            set_gradient_hooks(parameter, None)

    @torch.no_grad()
    def run(self) -> None:
        """Calls the hooks with `.grad`, and sets it to what they return."""
        for parameter, hooks in self.taken.items():
            for hook in list(hooks.values()):
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed  # refused by torch unless it is like the gradient

    def remove(self) -> None:
        """Puts the hooks back on the parameters."""
        for parameter, hooks in self.taken.items():
            hooks.update(gradient_hooks(parameter) or {})  # later ones come after them
            set_gradient_hooks(parameter, hooks)

    def _names(self, parameters: list[Parameter]) -> str:
        return ", ".join(self._capture.names[p] for p in parameters[:5])
