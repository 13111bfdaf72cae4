"""The interface for private training, which passes gradients by calls, not by autograd."""

import torch
from torch.nn import Parameter

from ddp.internals.gradients import Gradients, Reduction
from ddp.internals.ownership import activate


class ManualGradients:
    """An interface for callers that fill `.grad` themselves and say when each is final.

    For each parameter: `before_gradient`, add to `.grad`, `gradient_ready`; after the last one
    `finish_gradient_synchronization`, as in ordinary training.
    """

    gradients: Gradients
    reduction: Reduction

    gradients_come_by_hand: bool = False
    """Set by the caller: autograd accumulates nothing, all comes through `gradient_ready`."""

    def before_gradient(self, parameter: Parameter) -> None:
        """Prepares `parameter.grad` for a further addition, under `no_sync` too.

        Afterwards no collective is writing to it, it is of `gradient_dtype`, and what it holds is
        this rank's part: nothing, what was accumulated so far, or its share of what is reduced.

        Raises:
            ValueError: if the parameter is not one of the module's trainable ones.
        """
        i = self.gradients.index_of(parameter, "before_gradient")
        activate(self)
        self.before_accumulation(i)

    def gradient_ready(self, parameter: Parameter) -> None:
        """Announces that `parameter.grad` is final for this backward and may be reduced.

        Call it for all parameters before the next forward, which takes an incomplete step for
        a step that failed, and discards it.

        Raises:
            ValueError: if the parameter is not one of the module's trainable ones.
            RuntimeError: for a gradient that is missing, sparse or not of `gradient_dtype`.
        """
        i = self.gradients.index_of(parameter, "gradient_ready")
        activate(self)
        if parameter.grad is None:
            raise RuntimeError(f"gradient_ready: {self.gradients.name(i)} has no gradient")
        self.after_accumulation(i)

    @property
    def reduce(self) -> str:
        """Returns `"mean"` or `"sum"`, the reduction over ranks."""
        return self.reduction.name

    @reduce.setter
    def reduce(self, value: str) -> None:
        self.reduction.name = value

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Returns the smallest dtype of `.grad` and its collective; None: the parameter's own.

        With `torch.float32`, gradients of 16-bit parameters are float32, others stay as they are.
        Set it between steps, on all ranks; gradients that exist are converted. Some optimizers
        need a `.grad` of the parameter's own dtype. To replace it, set the parameter's
        `grad_dtype`. The next training forward, or the next `before_gradient`, restores it.

        Raises:
            ValueError: for a dtype that is not a floating one.
            RuntimeError: in the middle of a step, where gradients are on their way.
        """
        return self.gradients.dtypes.least

    @gradient_dtype.setter
    def gradient_dtype(self, value: torch.dtype | None) -> None:
        if value is not None and not value.is_floating_point:
            raise ValueError(f"gradient_dtype: {value} is not a floating type")
        dtypes = self.gradients.dtypes
        before, old = dtypes.all(), dtypes.least
        dtypes.least = value
        if dtypes.all() == before:
            return
        if self.is_in_mid_step():
            dtypes.least = old
            raise RuntimeError(
                "gradient_dtype cannot change in the middle of a step: "
                "call finish_gradient_synchronization first"
            )
        dtypes.give_all()
        self.adopt_order(self.schedule.order)
