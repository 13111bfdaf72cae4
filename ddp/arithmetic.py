"""What travels: means or sums, and in which type.

Ordinary training averages gradients and keeps each in its parameter's own type. Private training
needs sums, since its divisor is a public constant, and it needs them in float32: noise is added to
the sum, and only what comes out is rounded to the type of a 16-bit parameter.

PyTorch ties the type of `.grad` to the parameter's unless `parameter.grad_dtype` says otherwise,
and lets that be changed only while there is no gradient
(https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad_dtype.html).
"""

import torch
import torch.distributed as dist
from torch import promote_types
from torch.nn import Parameter

REDUCTIONS = ("mean", "sum")


class Arithmetic:
    """The two settings of `ddp.base.DataParallel` that say how gradients are added up."""

    _parameters_by_index: list[Parameter]
    _own_dtypes: list[torch.dtype | None]  # `grad_dtype` of each parameter when it was wrapped
    _given_dtypes: dict[Parameter, torch.dtype | None]  # that of those which now have another
    _gradient_dtype: torch.dtype | None = None

    @property
    def reduce(self) -> str:
        """`"mean"` or `"sum"` over the ranks."""
        return self._reduce

    @reduce.setter
    def reduce(self, value: str) -> None:
        if value not in REDUCTIONS:
            raise ValueError(f"reduce: {value!r} is unknown, choose one of {', '.join(REDUCTIONS)}")
        self._reduce = value

    @property
    def reduce_op(self) -> dist.ReduceOp.RedOpType:
        """The collective's own operation: averaging inside it saves a pass over memory."""
        return dist.ReduceOp.AVG if self.reduce == "mean" else dist.ReduceOp.SUM

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The least type of a `.grad` and of its collective; None: the parameter's `grad_dtype`.

        With `torch.float32`, gradients of 16-bit parameters are float32, others stay as they are.
        Set it between steps, on all ranks; gradients that exist are converted. Whoever replaces a
        `.grad` by one of the parameter's own type, for an optimizer that wants that, sets the
        parameter's `grad_dtype` for it and need not set it back: the next training forward does,
        or the next `before_gradient`.

        Raises:
            ValueError: for a type that is not a floating one.
            RuntimeError: in the middle of a step, where gradients are on their way.
        """
        return self._gradient_dtype

    @gradient_dtype.setter
    def gradient_dtype(self, value: torch.dtype | None) -> None:
        if value is not None and not value.is_floating_point:
            raise ValueError(f"gradient_dtype: {value} is not a floating type")
        before = self._dtypes()
        self._gradient_dtype, old = value, self._gradient_dtype
        if self._dtypes() != before:
            if self._is_in_mid_step():
                self._gradient_dtype = old
                raise RuntimeError(
                    "gradient_dtype cannot change in the middle of a step: "
                    "call finish_gradient_synchronization first"
                )
            self._give_dtypes()
            self._adopt_order(self._order)

    def dtype_of(self, i: int) -> torch.dtype:
        """Returns the dtype of gradient `i`: the user's `grad_dtype`, or a wider one."""
        own = self._own_dtypes[i] or self._parameters_by_index[i].dtype
        return own if self._gradient_dtype is None else promote_types(own, self._gradient_dtype)

    def _dtypes(self) -> list[torch.dtype]:
        return [self.dtype_of(i) for i in range(len(self._parameters_by_index))]

    def _give_dtypes(self) -> None:
        for i in range(len(self._parameters_by_index)):
            self._give_dtype(i)

    def _give_dtype(self, i: int) -> None:
        parameter, own = self._parameters_by_index[i], self._own_dtypes[i]
        dtype = own if self._gradient_dtype is None else self.dtype_of(i)
        if dtype == own:
            self._given_dtypes.pop(parameter, None)
        else:
            self._given_dtypes[parameter] = own
        give_dtype(parameter, dtype)

    def _conform(self, i: int) -> None:
        """After someone has replaced `.grad` by one of the parameter's own type."""
        if self._gradient_dtype is not None:
            self._give_dtype(i)

    def _conform_all(self) -> None:
        if self._gradient_dtype is not None:
            self._give_dtypes()

    def _raise_if_rounded(self, i: int) -> None:
        """What has been rounded already must not pass for a sum in the wider type."""
        gradient = self._parameters_by_index[i].grad
        if gradient.dtype == self.dtype_of(i):
            return
        what = f"{self._name(i)} has a gradient of {gradient.dtype} in place of {self.dtype_of(i)}"
        if self._gradient_dtype is not None:
            raise RuntimeError(
                f"gradient_ready: {what}: call before_gradient, then assign one of that type"
            )
        raise RuntimeError(f"{what}: set the parameter's grad_dtype before it is wrapped")


def give_dtype(parameter: Parameter, dtype: torch.dtype | None) -> None:
    """Let `parameter.grad` be of `dtype` (None: any), and make it so if there is one."""
    if parameter.grad_dtype != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient.to(dtype)
