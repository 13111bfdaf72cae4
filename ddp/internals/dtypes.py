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
        all: the dtype of each gradient, by index.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self._parameters = parameters
        self._own = [p.grad_dtype for p in parameters]
        self.set_least(None)

    def set_least(self, least: torch.dtype | None) -> None:
        self.least = least
        own = [dtype or p.dtype for dtype, p in zip(self._own, self._parameters, strict=True)]
        self.all = own if least is None else [torch.promote_types(dtype, least) for dtype in own]

    def give(self, *indices: int) -> None:
        """Sets `grad_dtype` of these parameters, default all, and converts their gradients."""
        for i in indices or range(len(self._parameters)):
            _give(self._parameters[i], self._own[i] if self.least is None else self.all[i])

    def conform(self, *indices: int) -> None:
        """Sets `grad_dtype` anew after someone has set the parameter's own; default: of all."""
        if self.least is not None:
            self.give(*indices)

    def give_back(self) -> None:
        """Sets `grad_dtype` of each parameter to what it was."""
        if self.least is not None:
            for parameter, own in zip(self._parameters, self._own, strict=True):
                _give(parameter, own)


def _give(parameter: Parameter, dtype: torch.dtype | None) -> None:
    if parameter.grad_dtype != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient.to(dtype)
