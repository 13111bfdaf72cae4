"""The loss of a batch as one loss per sample: a tensor of one number, whose `backward` clips."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dp_clipping.capture.checks.terms import AFTER_NOISE, THROUGH, leaves_of
from dp_clipping.sampling.usage import BOTH_OUTPUTS
from dp_clipping.torch_compat import tree_map, without_memory

LINEAR: dict[str, Callable[..., Any]] = {  # functions that act on each sample's loss
    "add": operator.add, "sub": operator.sub, "subtract": operator.sub,
    "rsub": lambda a, b: b - a, "__rsub__": lambda a, b: b - a,
    "mul": operator.mul, "multiply": operator.mul,
    "div": operator.truediv, "divide": operator.truediv, "true_divide": operator.truediv,
    "neg": operator.neg, "negative": operator.neg, "positive": operator.pos,
}  # fmt: skip
CONVERSIONS = {
    "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type_as", "clone", "contiguous",
}  # fmt: skip
WITHOUT_VALUE = {  # functions and properties of a tensor that do not read what is in it
    "dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "is_same_size",
    "__len__", "__hash__",
}  # fmt: skip
VALUES = {"data", "real", "imag", "T", "mT", "H", "mH"}  # properties that do
DETACHED = {  # functions whose results have no gradient
    "data", "item", "tolist", "__float__", "__int__", "__complex__", "numpy", "__array__",
    "__dlpack__", "__deepcopy__", "__reduce_ex__",
}  # fmt: skip
ACCUMULATING = {  # modules that divide a loss by steps of accumulation -> where these are given
    "accelerate.accelerator": "Accelerator(gradient_accumulation_steps={n})",
    "lightning.pytorch.loops.optimization.automatic": "Trainer(accumulate_grad_batches={n})",
    "pytorch_lightning.loops.optimization.automatic": "Trainer(accumulate_grad_batches={n})",
}
SCALING = "torch.amp.grad_scaler"  # the module that multiplies a loss by a scale
READ_ONLY = (
    "the value of a private loss has no gradient behind {name}, which is no sum or multiple of "
    "losses: call backward() of the private losses themselves, as (loss_a + 0.5 * loss_b)"
    ".backward(), and put other functions into the criterion, sample by sample"
)
OF_TWO_FORWARDS = (
    "losses of two forwards were added, and a sample has one gradient, of one forward: "
    + BOTH_OUTPUTS
)
OF_EVALUATION = (
    "backward of a loss of evaluation: call model.train() before the forward of a private step, "
    "with gradients enabled, then the criterion"
)
FROZEN = (
    "every parameter of the private network is frozen, so its forward was no private step: call "
    "model.requires_grad_(True) before the forward"
)
REENTRANT = (
    "activation checkpointing with use_reentrant=True hides the layers from a private step: "
    "checkpoint(.., use_reentrant=False), of a Hugging Face model "
    'gradient_checkpointing_enable({"use_reentrant": False})'
)


def refuse_reentrant(error: RuntimeError) -> None:
    """Raises RuntimeError with a cure if an error is PyTorch's about reentrant checkpointing."""
    if "use_reentrant=True" in str(error):
        raise RuntimeError(REENTRANT) from error


ANCHOR = torch.zeros((), requires_grad=True, device="cpu")  # a leaf of all that was read of losses


class ReadOnly(Function):
    """Returns the value of a private loss; a backward that comes to it raises the message."""

    @staticmethod
    def forward(ctx, anchor, value, message):
        ctx.message = message
        return value.view_as(value)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(ctx.message)


class PrivateLoss(Tensor):
    """A tensor of one number, the mean or sum of losses [B], whose `backward()` clips.

    `backward()`, or `torch.autograd.backward(loss)`, adds the clipped sum of the samples' gradients
    to `.grad`. Sums, differences and multiples are private losses again; they act on each sample's
    loss. A tensor to add or multiply with has no gradient and is one number, or one per sample.
    Any other function of torch, as `loss.view(1)`, is given the number, as `detach()` returns it,
    and what it returns has no backward.

    With `PrivacyEngine(hide_unprotected=True)` a training loss cannot be looked at. One of
    evaluation can: what that data is, is the user's own matter.

    Args:
        model: the private model.
        private_step: of the forward; None in evaluation.
        losses: [B].
        reduction: `"mean"` or `"sum"`.
    """

    model: Any
    loss_reduction: str
    _private_step: Any
    _losses: Tensor

    @staticmethod
    def __new__(
        cls, model: Any, private_step: Any, losses: Tensor, reduction: str
    ) -> "PrivateLoss":
        return without_memory(cls, losses.new_empty(()), losses.dtype)

    def __init__(self, model: Any, private_step: Any, losses: Tensor, reduction: str):
        self.model, self._private_step = model, private_step
        self._losses, self.loss_reduction = losses, reduction

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Calls a function of torch, which Python's operators are too, with private losses."""
        kwargs, name = kwargs or {}, _name_of(function)
        first = args[0] if args else None
        if name in WITHOUT_VALUE:
            return super().__torch_function__(function, types, args, kwargs)
        if function is torch.autograd.backward:
            return _backward(*args, **kwargs)
        if function is torch.autograd.grad:
            raise ValueError(
                "torch.autograd.grad of a private loss would return a gradient that is not "
                "clipped: call loss.backward(), and after optimizer.pre_step() read what has noise "
                "in .grad of the parameters"
            )
        if name in LINEAR and not kwargs:
            return _linear(name, args)
        if isinstance(first, PrivateLoss):
            return first._called(function, name, args, kwargs)
        if name == "add_" and not kwargs and not first.requires_grad:
            made = args[1] + first.clone()  # for total += loss, which keeps what is returned
            first.add_(args[1].detach())
            return made
        return _read(function, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Gives an operator, as `torch.tensor(loss)` calls one, the number."""
        args, kwargs = tree_map(_value, (args, kwargs or {}))
        return function(*args, **kwargs)

    # `loss += x` is another loss, and no change of this one.
    __iadd__, __isub__ = Tensor.__add__, Tensor.__sub__  # type: ignore[assignment]
    __imul__, __itruediv__ = Tensor.__mul__, Tensor.__truediv__  # type: ignore[assignment]

    def __round__(self, digits: int | None = None) -> float:
        return round(self.item(), digits)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        views = 1 if self._private_step is None else self.model.views
        samples = self.loss_per_sample.numel() // views
        return f"PrivateLoss({self.item():.4f}, {self.loss_reduction} of {samples} samples)"

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._private_step is not None

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self._losses.grad_fn if self.requires_grad else None

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self.grad_fn is None

    def requires_grad_(self, requires_grad: bool = True) -> "PrivateLoss":
        """Returns the loss itself: it has a gradient in training."""
        if requires_grad != self.requires_grad:
            raise RuntimeError(
                "a private loss has a gradient in training, and none in evaluation: call "
                "detach() for the number alone"
            )
        return self

    @property
    def loss_per_sample(self) -> Tensor:
        """Returns the losses [B], with `views` those of all rows. Not covered by ε."""
        step = self._private_step
        if step is None:
            return self._losses
        self.model.refuse_in_release("the loss in training")
        if step.padding is not None:
            raise RuntimeError("losses of samples have another shape in each step: use detach()")
        losses, fill = self._losses[: step.real], step.fill
        return losses if fill is None else losses[~fill[: len(losses)]]

    def backward(  # type: ignore[override]
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
        if self._private_step is None:
            own = self.model.capture.parameters
            if leaves_of(self._losses) - set(own):
                raise RuntimeError(THROUGH)
            frozen = not any(p.requires_grad for p in own)
            raise RuntimeError(FROZEN if frozen else OF_EVALUATION)
        try:
            self.model.private_backward(self._private_step, self._losses)
        except RuntimeError as error:
            refuse_reentrant(error)
            raise

    def detach(self) -> Tensor:  # type: ignore[override]
        """Returns the mean (0 for an empty batch) or the sum. Not covered by ε."""
        step = self._private_step
        without, views = (None, 1) if step is None else (step.without_loss, self.model.views)
        if without is not None:
            self.model.refuse_in_release("the loss in training")
            total = self._losses.detach().masked_fill(without, 0).sum()
            return total / (views if self.loss_reduction == "sum" else (~without).sum())
        losses = self.loss_per_sample.detach()
        is_sum = self.loss_reduction == "sum" or losses.numel() == 0
        return losses.sum() / views if is_sum else losses.mean()

    def _called(self, function: Any, name: str, args: tuple, kwargs: dict) -> Any:
        """Returns what a function that is not linear makes of this loss, its first argument."""
        if name in DETACHED:
            return _read(function, name, args, kwargs)
        if name in CONVERSIONS:
            losses = function(self._losses.view(-1, 1), *args[1:], **kwargs)
            if losses.device == self._losses.device:  # else it is the number alone
                return self._with(losses.reshape(-1))
        elif name in ("mean", "sum"):
            by = self.loss_reduction
            if name == by and len(args) == 1 and not kwargs:
                return self
            return _read(function, name, args, kwargs, message=(
                f"a private loss is the {by} of its batch already: call loss.backward(); a {name} "
                f'is that of make_private(criterion=..(reduction="{name}"), '
                f'loss_reduction="{name}", ..)'
            ))  # fmt: skip
        elif name in ("register_hook", "retain_grad"):
            raise RuntimeError(
                "a private loss takes no hooks, which would see gradients that are not clipped: "
                "call optimizer.pre_step() after loss.backward(), and read .grad of the parameters"
            )
        elif name == "__set__" or (name.endswith("_") and not name.endswith("__")):
            raise RuntimeError(
                f"{name.strip('_')}() would change a private loss in place: make another one, as "
                "loss = 0.5 * loss + other_loss"
            )
        return _read(function, name, args, kwargs)

    def _with(self, losses: Tensor) -> "PrivateLoss":
        return PrivateLoss(self.model, self._private_step, losses, self.loss_reduction)

    def _operand(self, other: Any) -> Any:
        """Returns what is added to, or multiplied with, the losses [B]."""
        if isinstance(other, PrivateLoss):
            if other.loss_reduction != self.loss_reduction:
                raise ValueError("a mean and a sum of losses do not add up sample by sample")
            return other._losses
        if not isinstance(other, Tensor):
            return other
        if other.requires_grad:
            names, leaves = self.model.capture.names, leaves_of(other)
            if leaves <= set(names):
                shown = ", ".join(sorted(names[p] for p in names if p in leaves)[:3])
                raise ValueError(AFTER_NOISE.format(names=shown))
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

    def _is_of_another_forward(self, other: Any) -> bool:
        if isinstance(other, PrivateLoss):  # without a step, as in evaluation, it is of no forward
            same = other._private_step is self._private_step
            return not same or len(other._losses) != len(self._losses)
        # What a sum of two forwards was read as.
        return isinstance(other, Tensor) and other.requires_grad and ANCHOR in leaves_of(other)


def _linear(name: str, args: tuple) -> Any:
    """Returns a sum, difference or multiple of losses, sample by sample."""
    operate = LINEAR[name]
    losses = [x for x in args if isinstance(x, PrivateLoss)]
    first = losses[0]
    if operate is operator.truediv and first is not args[0]:
        return _read(operate, name, args, {})  # a number over a loss
    if operate in (operator.mul, operator.truediv):
        _refuse_scaling(args[-1])
        if len(losses) > 1:
            raise ValueError(
                "a private loss is multiplied and divided by constants: put products of losses "
                "into the criterion, sample by sample"
            )
    elif any(map(first._is_of_another_forward, args)):
        return _read(operate, name, args, {}, message=OF_TWO_FORWARDS)
    return first._with(operate(*map(first._operand, args)))


def _refuse_scaling(factor: Any) -> None:
    """Raises an error if a library scales a loss for steps that private training does not take."""
    frame: Any = inspect.currentframe()
    while frame.f_globals.get("__name__") in (__name__, "torch._tensor"):
        frame = frame.f_back
    by = frame.f_globals.get("__name__", "")
    if by == SCALING:
        raise RuntimeError(
            "torch.amp.GradScaler skips steps by what it sees in the data: use bfloat16, which "
            "needs no scaler"
        )
    if by in ACCUMULATING and factor != 1:
        raise RuntimeError(
            f"{ACCUMULATING[by].format(n=factor)} divides each loss by {factor}, and takes a "
            "step on several Poisson batches: leave it at 1, and split whole batches with "
            "BatchMemoryManager(data_loader=loader, max_physical_batch_size=.., optimizer=..)"
        )


def _name_of(function: Any) -> str:
    """Returns the name of a function of torch, or of a property of tensors that it gets."""
    name = getattr(function, "__name__", "")
    if name != "__get__":
        return name
    of = function.__self__.__name__
    return of if of in VALUES else "size"


def _value(x: Any) -> Any:
    return x.detach() if isinstance(x, PrivateLoss) else x


def _read(function: Any, name: str, args: tuple, kwargs: dict, message: str | None = None) -> Any:
    """Returns what a function makes of the numbers. A backward of that raises the message."""

    def value(x: Any) -> Any:
        if name in DETACHED or not (isinstance(x, PrivateLoss) and x.requires_grad):
            return _value(x)
        return ReadOnly.apply(ANCHOR, x.detach(), message or READ_ONLY.format(name=name))

    args, kwargs = tree_map(value, (args, kwargs))
    return function(*args, **kwargs)


def _backward(
    losses: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
    grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    """Runs `torch.autograd.backward` of one private loss, or of several of one forward."""
    if not all(isinstance(loss, PrivateLoss) for loss in losses):
        raise ValueError(
            "torch.autograd.backward of private and other losses together: call backward() of the "
            "private loss, and of the others after optimizer.step()"
        )
    weights = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors or ()
    gradient = next((weight for weight in weights if weight is not None), None)
    sum(losses).backward(gradient, retain_graph, create_graph, inputs)
