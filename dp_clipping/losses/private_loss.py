"""The loss of a batch as one loss per sample: prints as one number, and its `backward` clips."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from dp_clipping.step.steppable import Steppable

ACCUMULATING = {  # modules that divide a loss by steps of accumulation -> where these are given
    "accelerate.accelerator": "Accelerator(gradient_accumulation_steps={n})",
    "lightning.pytorch.loops.optimization.automatic": "Trainer(accumulate_grad_batches={n})",
    "pytorch_lightning.loops.optimization.automatic": "Trainer(accumulate_grad_batches={n})",
}
REENTRANT = (
    "activation checkpointing with use_reentrant=True hides the layers from a private step: "
    "checkpoint(.., use_reentrant=False), of a Hugging Face model "
    'gradient_checkpointing_enable({"use_reentrant": False})'
)


@contextmanager
def naming_reentrant() -> Iterator[None]:
    """Enters a context that explains PyTorch's error about reentrant checkpointing."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise RuntimeError(REENTRANT) from error


class PrivateLoss:
    """Losses [B] that print and backpropagate as one number.

    `backward()` adds the clipped sum of the samples' gradients to `.grad`. Sums, differences and
    multiples work as for a tensor; they act on each sample's loss. A tensor to add or multiply with
    has no gradient and is one number, or one per sample. Most methods are these operators, and
    those of a tensor that training loops call (`item`, `detach`, `backward`).

    With `PrivacyEngine(hide_unprotected=True)` a training loss cannot be looked at. One of
    evaluation can: what that data is, is the user's own matter.
    """

    def __init__(self, model: Steppable, private_step: Any, losses: Tensor, reduction: str):
        self.model, self._session = model, private_step
        self._losses, self.loss_reduction = losses, reduction

    @property
    def loss_per_sample(self) -> Tensor:
        """Returns the losses [B]. Not covered by ε."""
        if self._session is None:
            return self._losses
        self.model.refuse_in_release("the loss in training")
        if self._session.padding is not None:
            raise RuntimeError("losses of samples have another shape in each step: use detach()")
        losses, fill = self._losses[: self._session.real], self._session.fill
        return losses if fill is None else losses[~fill[: len(losses)]]

    def backward(
        self,
        gradient: None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: None = None,
    ) -> None:
        """Adds the clipped sum of the samples' gradients to `.grad`; arguments keep their default.

        Raises:
            RuntimeError: for a loss of evaluation, and for layers under reentrant checkpointing.
            ValueError: for an argument of a tensor's `backward`, as there is no second one.
        """
        for name, value in (
            ("gradient", gradient), ("retain_graph", retain_graph),
            ("create_graph", create_graph), ("inputs", inputs),
        ):  # fmt: skip
            if value is not None and value is not False:
                raise ValueError(
                    f"backward({name}=..) of a private loss: each forward has one backward, which "
                    "clips the gradients of all parameters: add the losses of a batch, scaled as "
                    "wanted, and call (loss_a + 0.5 * loss_b).backward()"
                )
        if self._session is None:
            raise RuntimeError(
                "backward of a loss of evaluation: call the model in training mode with gradients "
                "enabled, then the criterion"
            )
        with naming_reentrant():
            self.model.private_backward(self._session, self._losses)

    def detach(self) -> Tensor:
        """Returns the mean (0 for an empty batch) or the sum. Not covered by ε."""
        without = None if self._session is None else self._session.without_loss
        if without is not None:
            self.model.refuse_in_release("the loss in training")
            total = self._losses.detach().masked_fill(without, 0).sum()
            return total if self.loss_reduction == "sum" else total / (~without).sum()
        losses = self.loss_per_sample.detach()
        if self.loss_reduction == "sum" or losses.numel() == 0:
            return losses.sum()
        return losses.mean()

    def item(self) -> float:
        return self.detach().item()

    __float__ = item

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if specification else repr(self)

    def _with(self, losses: Tensor) -> "PrivateLoss":
        return PrivateLoss(self.model, self._session, losses, self.loss_reduction)

    def _constant(self, other: Any) -> Any:
        if isinstance(other, PrivateLoss):
            raise ValueError(
                "a private loss is multiplied and divided by constants: put products of losses "
                "into the criterion, sample by sample"
            )
        if not isinstance(other, Tensor):
            return other
        if other.requires_grad:
            raise ValueError(
                "a private loss is combined with a tensor that has a gradient of its own, which "
                "may depend on all samples: put the term into the criterion, one value per sample"
            )
        if other.numel() != 1 and other.shape != self._losses.shape:
            raise ValueError(
                f"a private loss of {len(self._losses)} samples is combined with a tensor of shape "
                f"{tuple(other.shape)}: give one number, or one per sample"
            )
        return other.reshape(()) if other.numel() == 1 else other

    def _other(self, other: Any) -> Any:
        if not isinstance(other, PrivateLoss):
            return self._constant(other)
        if other.loss_reduction != self.loss_reduction or other._session is not self._session:
            raise ValueError(
                "losses of different batches or reductions do not add up sample by sample"
            )
        return other._losses

    def __add__(self, other: Any) -> "PrivateLoss":
        return self._with(self._losses + self._other(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "PrivateLoss":
        return self._with(self._losses - self._other(other))

    def __rsub__(self, other: Any) -> "PrivateLoss":
        return self._with(self._constant(other) - self._losses)

    def __mul__(self, factor: Any) -> "PrivateLoss":
        return self._with(self._losses * self._constant(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "PrivateLoss":
        frame = inspect.currentframe()
        by = "" if frame is None else frame.f_back.f_globals.get("__name__", "")
        if by in ACCUMULATING and divisor != 1:
            raise RuntimeError(
                f"{ACCUMULATING[by].format(n=divisor)} divides each loss by {divisor}, and takes a "
                "step on several Poisson batches: leave it at 1, give the loader of make_private "
                "the batch size of a whole step, and split it with BatchMemoryManager(data_loader="
                "loader, max_physical_batch_size=.., optimizer=optimizer)"
            )
        return self._with(self._losses / self._constant(divisor))

    def __neg__(self) -> "PrivateLoss":
        return self._with(-self._losses)

    def mean(self) -> NoReturn:
        """Raises TypeError, as `sum` does: the reduction is that of the criterion."""
        raise TypeError(
            f"a private loss is the {self.loss_reduction} of its batch already: call "
            'loss.backward(); a sum is that of make_private(criterion=..(reduction="sum"), '
            'loss_reduction="sum", ..)'
        )

    sum = mean

    def __iter__(self) -> NoReturn:
        """Raises TypeError: `torch.amp.GradScaler` tries it with a loss that is not a tensor."""
        raise TypeError(
            "a private loss is one number, not to be iterated over; if torch.amp.GradScaler asked: "
            "it skips steps by what it sees in the data, so use bfloat16, which needs no scaler"
        )

    def __repr__(self) -> str:
        samples = self.loss_per_sample.numel()
        return f"PrivateLoss({self.item():.4f}, {self.loss_reduction} of {samples} samples)"
