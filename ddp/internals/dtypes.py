"""The dtype of each `.grad` and of its collective.

Ordinary training keeps each gradient in its parameter's own dtype. Private training adds noise to
sums in float32, and only the result is rounded to the dtype of a 16-bit parameter.

PyTorch ties the dtype of `.grad` to the parameter's unless `parameter.grad_dtype` says otherwise,
and lets that be changed only while there is no gradient
(https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad_dtype.html).
"""

from collections.abc import Sequence

import torch
from torch.nn import Parameter


class GradientDtypes:
    """Keeps `grad_dtype` of each parameter at its own value or, if that is narrower, at `least`.

    Attributes:
        least: the narrowest dtype of a `.grad`; None: each parameter's own `grad_dtype`.
        given: the parameters that have another `grad_dtype` than their own now, and their own.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self._parameters = parameters
        self._own = [p.grad_dtype for p in parameters]
        self.least: torch.dtype | None = None
        self.given: dict[Parameter, torch.dtype | None] = {}

    def of(self, i: int) -> torch.dtype:
        """Returns the dtype of gradient `i`."""
        own = self._own[i] or self._parameters[i].dtype
        return own if self.least is None else torch.promote_types(own, self.least)

    def all(self) -> list[torch.dtype]:
        return [self.of(i) for i in range(len(self._parameters))]

    def give(self, i: int) -> None:
        """Sets `grad_dtype` of parameter `i`, and converts its gradient if there is one."""
        parameter, own = self._parameters[i], self._own[i]
        dtype = own if self.least is None else self.of(i)
        if dtype == own:
            self.given.pop(parameter, None)
        else:
            self.given[parameter] = own
        give_dtype(parameter, dtype)

    def give_all(self) -> None:
        for i in range(len(self._parameters)):
            self.give(i)

    def conform(self, *indices: int) -> None:
        """Sets `grad_dtype` anew after someone has set the parameter's own; default: of all."""
        if self.least is not None:
            for i in indices or range(len(self._parameters)):
                self.give(i)


def give_back(given: dict[Parameter, torch.dtype | None]) -> None:
    """Sets `grad_dtype` of each parameter to what it was, and empties `given`."""
    while given:
        give_dtype(*given.popitem())


def give_dtype(parameter: Parameter, dtype: torch.dtype | None) -> None:
    """Allows `parameter.grad` to be of `dtype` (None: any), and converts an existing one."""
    if parameter.grad_dtype != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient.to(dtype)
