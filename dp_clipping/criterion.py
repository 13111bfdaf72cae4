"""The user's criterion, which returns one loss per sample."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.samples.batch import Batch, Shapes, hold_objects, tensors_of
from dp_clipping.capture.samples.packed import opened, packed, packed_in
from dp_clipping.guard.carried import Carried
from dp_clipping.guard.losses import Criterion
from dp_clipping.kinds import WrongType, shown
from dp_clipping.losses.private_loss import PrivateLoss
from dp_clipping.trials.objects import State
from dp_clipping.trials.randomness import same_randomness

OF_SHARED = (
    "the criterion fails ({error}), and the network returns a tensor without samples, as a "
    "parameter, which has a row for each of them in training, [batch, ..]: use it in forward, and "
    "return what comes of it for each sample; or count its dimensions from behind, as "
    "factors[..., 0] in place of factors[0]"
)


class PrivateCriterion(nn.Module):
    """The user's criterion, called for one loss per sample.

    `criterion.reduction` is `"none"` during the call. What comes back is [B]; [B, ...] or, with
    `shape=(B, T, ...)` of the outputs before they were flattened, [B·T], is reduced over a sample's
    own entries: the mean (over targets that are not `ignore_index`, where the criterion has one) or
    the sum, as for `nn.KLDivLoss(reduction="batchmean")` too. Class weights are factors of entries:
    the mean is not divided by their sum, which PyTorch takes over the batch. Of `nn.CTCLoss` the
    mean is over a sample's targets.

    It is a module, so that it can take the place of one: `self.criterion = criterion`. The user's
    is its child, and moves with it; the private model is not.

    Raises:
        ValueError: if the losses are not one per sample: already reduced, or of another batch; or
            if one depends on other samples (see `losses`), in batches 1, 2, 4, 8, ...
    """

    model: Any  # a `PrivateModel`, hidden from `parameters()`

    def __init__(self, model: Any, criterion: Callable[..., Tensor], reduction: str):
        own = getattr(criterion, "reduction", reduction)
        if own != reduction and (own, reduction) != ("batchmean", "mean"):
            raise ValueError(
                f"loss_reduction is {reduction!r} and criterion.reduction {own!r}: both must be "
                "'mean' or both 'sum', as in make_private(criterion=nn.CrossEntropyLoss("
                "reduction='mean'), loss_reduction='mean', ..)"
            )
        super().__init__()
        self.criterion, self.loss_reduction = criterion, reduction
        self._adds_entries = reduction == "sum" or own == "batchmean"
        self._is_ctc = isinstance(criterion, nn.CTCLoss) and reduction == "mean"
        self.__dict__["model"] = model
        of_rows = partial(Batch, batch_first=True)
        self._carried = Carried(State(criterion), self._again, of_rows)
        self._shapes = Shapes()
        self._is_opened = False  # what it was given last had packed sequences

    def __call__(
        self, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any
    ) -> PrivateLoss | Tensor:
        if self.model.policy is None:
            losses, views = self._per_sample(*args, shape=shape, **kwargs), 1
            if self.model.training and torch.is_grad_enabled():
                ticket, views = self.model.step_state.ticket, self.model.views
                losses = losses[: ticket.real_of(len(losses))]
                fill = ticket.fill_of(len(losses))
                losses = losses if fill is None else losses[~fill.to(losses.device)]
            return losses.mean() if self.loss_reduction == "mean" else losses.sum() / views
        if not self.model.takes_step:
            losses = self._per_sample(*args, shape=shape, **kwargs)
            return PrivateLoss(self.model, None, losses, self.loss_reduction)
        private_step = self.model.step_state.pending
        if private_step is None:
            raise RuntimeError(
                "the criterion was called before the private model's forward: call the model that "
                "make_private returned for each batch, criterion(model(x), y), and not the network "
                "itself or one of its methods; compile it before make_private"
            )
        if private_step.is_empty:
            losses = self._of_no_samples(args, kwargs)
            return PrivateLoss(self.model, private_step, losses, self.loss_reduction)
        is_opened = hold_objects(args, kwargs) and bool(packed_in((args, kwargs)))
        if is_opened is not self._is_opened:  # a module's attributes are slow to set
            self._is_opened = is_opened
        if is_opened:
            args, kwargs = opened((args, kwargs), self.model.batch_first)
        mark = self._carried.state.mark()
        try:
            losses = self._per_sample(*args, shape=shape, **kwargs)
        except (RuntimeError, IndexError) as error:
            if self._is_given_shared():
                raise ValueError(OF_SHARED.format(error=error)) from error
            raise
        if changes := mark.changes():
            self._carried.check_call(changes, mark, args, kwargs, "the criterion")
        expected = private_step.rows
        if losses.dim() != 1 or losses.shape[0] != expected:
            raise ValueError(
                f"the criterion gave losses of shape {tuple(losses.shape)} for {expected} samples: "
                "it must return one per sample, not a loss already reduced over the batch; give "
                "nn.CrossEntropyLoss() or partial(F.cross_entropy, reduction='none'), and for "
                "flattened targets pass shape=outputs.shape, as it is before flattening; for "
                "outputs of several forwards give make_private a module whose forward returns both"
            )

        if private_step.watched is not None or private_step.lengths:
            again = Criterion(
                self._per_sample, self._carried.state, args, kwargs, expected, shape,
                self.model.batch_first, self._shapes, max(1, private_step.real),
            )  # fmt: skip
            if private_step.watched is not None:
                private_step.checks.append(partial(again.check, private_step.watched.number))
            private_step.look_at(losses, again.of_sample)
        self._shapes.note((args, kwargs), expected)
        return PrivateLoss(self.model, private_step, losses, self.loss_reduction)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes copies and pickles the user's criterion, as those of a model are its network."""
        return _own, (self.criterion,)

    def for_model(self, model: Any) -> "PrivateCriterion":
        """Returns the same criterion for another model's outputs, as `engine.check` calls it."""
        return PrivateCriterion(model, self.criterion, self.loss_reduction)

    def _is_given_shared(self) -> bool:
        """Returns whether the network returns what all samples share, which it gives each of them.

        So it does where it computes with parameters of its own.
        """
        own = vars(self.model.network).get("_private")
        layouts = [one for known in own.output_layouts.values() for one in known] if own else []
        return any(layout.kind == "shared" for layout in layouts)

    def _of_no_samples(self, args: tuple, kwargs: dict) -> Tensor:
        """Returns losses [0] of an empty batch, which many criterions (CTC) do not take."""
        sums = [x.float().sum() for x in tensors_of((args, kwargs)) if x.requires_grad]
        return (sum(sums[1:], sums[0]) if sums else torch.zeros((), device="cpu")).expand(0)

    def _per_sample(self, *args: Any, shape: tuple[int, ...] | None, **kwargs: Any) -> Tensor:
        if shape is not None and not (isinstance(shape, tuple) and len(shape) > 1):
            raise WrongType(f"shape is {shown(shape)}: give outputs.shape, before it is flattened")
        losses = self._unreduced(*args, **kwargs)
        if not isinstance(losses, Tensor):
            raise WrongType(f"the criterion returned {shown(losses)}: give a tensor [batch]")
        if shape is not None and losses.dim() == 1 and losses.shape[0] == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1])
        if self._is_ctc:
            return losses / _lengths_of_targets(*args, **kwargs).to(losses).clamp_min(1)
        if losses.dim() == 0 and hasattr(self.criterion, "reduction"):
            return losses.view(1)  # of a batch of one sample, whose outputs were squeezed
        if losses.dim() < 2:
            return losses
        total = losses.flatten(1).sum(1)
        return total if self._adds_entries else total / self._counted(losses, args, kwargs)

    @torch.no_grad()
    def _again(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = tensors_of((args, kwargs))
        with same_randomness(device=tensors[0].device if tensors else None):
            return self._unreduced(*args, **kwargs)

    def _unreduced(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns losses with reduction "none", or as they are from a function without one."""
        if self._is_opened:
            args, kwargs = packed((args, kwargs), self.model.batch_first)
        own: Any = self.criterion
        if not hasattr(own, "reduction"):
            return own(*args, **kwargs)
        before, own.reduction = own.reduction, "none"
        try:
            return own(*args, **kwargs)
        finally:
            own.reduction = before

    def _counted(self, losses: Tensor, args: tuple, kwargs: dict) -> Tensor | int:
        """Returns the number of entries of each sample in a mean: [B] or one number."""
        entries = losses[0].numel() if len(losses) else 1
        ignore_index = getattr(self.criterion, "ignore_index", None)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignore_index is None or not isinstance(target, Tensor):
            return max(entries, 1)
        if target.numel() != losses.numel():
            return max(entries, 1)
        valid = target.view(losses.shape) != ignore_index
        return valid.flatten(1).sum(1).clamp_min(1)


def _lengths_of_targets(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any
) -> Tensor:
    """Returns the last argument of `nn.CTCLoss`."""
    return torch.as_tensor(target_lengths, device=log_probs.device)


class _Function(nn.Module):
    """A criterion that is a function, where it takes the place of a module."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


def _own(criterion: Callable[..., Tensor]) -> nn.Module:
    """Returns what a copy of a criterion is, which pickle finds by this function's name."""
    return criterion if isinstance(criterion, nn.Module) else _Function(criterion)
