"""The loss of a batch as one loss a sample, and a `backward` that clips."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from dp_clipping.capture.batch import tensors_of
from dp_clipping.capture.checks.carried import Carried
from dp_clipping.capture.checks.losses import Exchange, Shapes
from dp_clipping.capture.randomness import same_generators
from dp_clipping.kinds import WrongType, shown
from dp_clipping.step.steppable import Steppable

REDUCTIONS = ("mean", "sum")


class PrivateLoss:
    """Losses [B] that print and backpropagate as one number.

    `backward()` adds the clipped sum of the samples' gradients to `.grad`. Sums, differences and
    multiples work as for a tensor; they act on each sample's loss. A tensor to add or multiply with
    has no gradient and is one number, or one a sample. Most methods are these operators, and those
    of a tensor that training loops call (`item`, `detach`, `backward`).

    With `PrivacyEngine(hide_unprotected=True)` a training loss cannot be looked at. One of
    evaluation can: what that data is, is the user's own matter.
    """

    def __init__(self, model: Steppable, private_step: Any, losses: Tensor, reduction: str):
        self.model, self._session = model, private_step
        self._losses, self.loss_reduction = losses, reduction

    @property
    def loss_per_sample(self) -> Tensor:
        """[B]. Not covered by ε."""
        if self._session is None:
            return self._losses
        self.model.refuse_in_release("the loss in training")
        if self._session.padding is not None:
            raise RuntimeError("losses of samples have another shape in each step: use detach()")
        return self._losses[: self._session.real]

    def backward(self) -> None:
        if self._session is None:
            raise RuntimeError(
                "backward of a loss of evaluation: call the model in training mode with gradients "
                "enabled, then the criterion"
            )
        self.model.private_backward(self._session, self._losses)

    def detach(self) -> Tensor:
        """Returns the mean (0 for an empty batch) or the sum. Not covered by ε."""
        padding = None if self._session is None else self._session.padding
        if padding is not None:
            self.model.refuse_in_release("the loss in training")
            total = self._losses.detach().masked_fill(padding, 0).sum()
            return total if self.loss_reduction == "sum" else total / (~padding).sum()
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
                "may depend on all samples: put the term into the criterion, one value a sample"
            )
        if other.numel() != 1 and other.shape != self._losses.shape:
            raise ValueError(
                f"a private loss of {len(self._losses)} samples is combined with a tensor of shape "
                f"{tuple(other.shape)}: give one number, or one a sample"
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
        return self._with(self._losses / self._constant(divisor))

    def __neg__(self) -> "PrivateLoss":
        return self._with(-self._losses)

    def __iter__(self) -> NoReturn:
        """Raises TypeError: `torch.amp.GradScaler` tries it with a loss that is not a tensor."""
        raise TypeError(
            "a private loss is one number, not to be iterated over; if torch.amp.GradScaler asked: "
            "it skips steps by what it sees in the data, so use bfloat16, which needs no scaler"
        )

    def __repr__(self) -> str:
        samples = self.loss_per_sample.numel()
        return f"PrivateLoss({self.item():.4f}, {self.loss_reduction} of {samples} samples)"


class PrivateCriterion:
    """The user's criterion, asked for one loss a sample.

    `criterion.reduction` is `"none"` during the call. What comes back is [B]; [B, ...] or, with
    `shape=(B, T, ...)` of the outputs before they were flattened, [B·T], is reduced over a sample's
    own entries: the mean (over targets that are not `ignore_index`, where the criterion has one) or
    the sum.

    Raises:
        ValueError: if the losses are not one a sample: already reduced, or of another batch; or if
            one depends on other samples (see `losses`), in batches 1, 2, 4, 8, ...
    """

    def __init__(self, model: Steppable, criterion: Callable[..., Tensor], reduction: str):
        own = getattr(criterion, "reduction", reduction)
        if own != reduction or reduction not in REDUCTIONS:
            raise ValueError(
                f"loss_reduction is {reduction!r} and criterion.reduction {own!r}: both must be "
                "'mean' or both 'sum'"
            )
        self.model, self.criterion, self.loss_reduction = model, criterion, reduction
        self._carried = Carried(criterion, self._again, batch_first=True)
        self._shapes = Shapes()
        self._largest = 0  # batch that has been looked at, all of it

    def __call__(
        self, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any
    ) -> PrivateLoss | Tensor:
        if self.model.policy is None:
            losses = self._per_sample(*args, shape=shape, **kwargs)
            if self.model.training and torch.is_grad_enabled():
                losses = losses[: self.model.step_state.usage.real_of(len(losses))]
            return losses.mean() if self.loss_reduction == "mean" else losses.sum()
        if not torch.is_grad_enabled() or not self.model.training:
            losses = self._per_sample(*args, shape=shape, **kwargs)
            return PrivateLoss(self.model, None, losses, self.loss_reduction)
        private_step = self.model.step_state.pending
        if private_step is None:
            raise RuntimeError("the criterion was called before the private model's forward")
        if private_step.is_empty:
            losses = self._of_no_samples(args, kwargs)
            return PrivateLoss(self.model, private_step, losses, self.loss_reduction)
        with self._carried.checked(args, kwargs, "the criterion"):
            losses = self._per_sample(*args, shape=shape, **kwargs)
        expected = private_step.batch_size
        if losses.dim() != 1 or len(losses) != expected:
            raise ValueError(
                f"the criterion gave losses of shape {tuple(losses.shape)} for {expected} samples: "
                "it must return one a sample, not a loss already reduced over the batch; give "
                "nn.CrossEntropyLoss() or partial(F.cross_entropy, reduction='none'), and for "
                "flattened targets pass shape=outputs.shape, as it is before flattening"
            )
        if private_step.watched is not None:
            private_step.watched.check_graph(losses)
            exchange = Exchange(
                self._per_sample, self._carried.state, args, kwargs, expected, shape,
                self.model.batch_first, self._shapes,
            )  # fmt: skip
            is_whole = expected > self._largest
            self._largest = max(self._largest, expected)
            exchange.check(private_step.watched.number, is_whole)
        self._shapes.note((args, kwargs), expected)
        return PrivateLoss(self.model, private_step, losses, self.loss_reduction)

    def for_model(self, model: Any) -> "PrivateCriterion":
        """Returns the same criterion for another model's outputs, as `engine.check` calls it."""
        return PrivateCriterion(model, self.criterion, self.loss_reduction)

    def _of_no_samples(self, args: tuple, kwargs: dict) -> Tensor:
        """Returns losses [0] of an empty batch, which many criterions (CTC) do not take."""
        sums = [x.float().sum() for x in tensors_of((args, kwargs)) if x.requires_grad]
        return (sum(sums[1:], sums[0]) if sums else torch.zeros(())).expand(0)

    def _per_sample(self, *args: Any, shape: tuple[int, ...] | None, **kwargs: Any) -> Tensor:
        if shape is not None and not (isinstance(shape, tuple) and len(shape) > 1):
            raise WrongType(f"shape is {shown(shape)}: give outputs.shape, before it is flattened")
        losses = self._unreduced(*args, **kwargs)
        if not isinstance(losses, Tensor):
            raise WrongType(f"the criterion returned {shown(losses)}: give a tensor [batch]")
        if shape is not None and losses.dim() == 1 and losses.shape[0] == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1])
        if losses.dim() < 2:
            return losses
        counted = self._counted(losses, args, kwargs)
        total = losses.flatten(1).sum(1)
        return total if self.loss_reduction == "sum" else total / counted

    @torch.no_grad()
    def _again(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.random.fork_rng(), same_generators(()):
            return self._unreduced(*args, **kwargs)

    def _unreduced(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns losses with reduction "none", or as they are from a function without one."""
        if not hasattr(self.criterion, "reduction"):
            return self.criterion(*args, **kwargs)
        before, self.criterion.reduction = self.criterion.reduction, "none"
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = before

    def _counted(self, losses: Tensor, args: tuple, kwargs: dict) -> Tensor | int:
        """Returns how many entries of each sample a mean is over: [B] or one number."""
        entries = losses[0].numel() if len(losses) else 1
        ignore_index = getattr(self.criterion, "ignore_index", None)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignore_index is None or target is None or target.numel() != losses.numel():
            return max(entries, 1)
        valid = target.view(losses.shape) != ignore_index
        return valid.flatten(1).sum(1).clamp_min(1)
