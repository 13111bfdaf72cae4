"""The gradients of one network: names, dtypes, and what each `.grad` holds.

A `.grad` holds this rank's own gradient, the reduced one, or nothing. Several backwards before one
finish each reduce their own terms. A reduced gradient is the same on all ranks; reducing it again
together with new local terms leaves its mean unchanged, and under `reduce="sum"` each rank first
takes back its share, 1/W of it (up to rounding, where W is no power of two). The ranks must run the
backwards of a step in one order.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp.buckets import Gradient


class Reduction:
    """Selects how ranks' gradients are combined: `"mean"` or `"sum"`.

    Attributes:
        contributors: number of ranks whose gradients are in a reduced one.
    """

    def __init__(self, name: str, contributors: int):
        self.contributors = contributors
        self.choose(name)

    def choose(self, name: str) -> None:
        if name not in ("mean", "sum"):
            raise ValueError(f"reduce: {name!r} is unknown, choose one of mean, sum")
        self.name = name

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        """Returns the collective's operation; averaging inside it saves a pass over memory."""
        return dist.ReduceOp.AVG if self.name == "mean" else dist.ReduceOp.SUM


class GradientDtypes:
    """Keeps `grad_dtype` of each parameter at its own value or, if that is narrower, at `least`.

    Ordinary training keeps each gradient in its parameter's own dtype. Private training adds noise
    to sums in float32, and only the result is rounded to the dtype of a 16-bit parameter. PyTorch
    lets `parameter.grad_dtype` be changed only while there is no gradient
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad_dtype.html).

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
        self._narrow: dict[int, torch.dtype] = {}  # of those that are wider
        own = [dtype or p.dtype for dtype, p in zip(self._own, self._parameters, strict=True)]
        self.all = own if least is None else [torch.promote_types(dtype, least) for dtype in own]

    def widen(self, i: int, dtype: torch.dtype) -> None:
        """Makes one gradient wider, until `narrow` is called of it."""
        if self.all[i] != dtype:
            self._narrow.setdefault(i, self.all[i])
            self.all[i] = dtype
            _give(self._parameters[i], dtype)

    def narrow(self, indices: Iterable[int]) -> None:
        """Takes `widen` back."""
        for i in self._narrow.keys() & indices:
            self.all[i] = self._narrow.pop(i)
            self.give(i)

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
        for parameter, own in zip(self._parameters, self._own, strict=True):
            _give(parameter, own)


def _give(parameter: Parameter, dtype: torch.dtype | None) -> None:
    if parameter.grad_dtype != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient.to(dtype)


class Gradients:
    """The gradients of the trainable parameters of `module`, by index.

    Attributes:
        parameters, names: the parameters, and of each its names in the network.
        reduced: indices of those whose `.grad` is the reduced value.
        filled: indices of those without a gradient on this rank, whose `.grad` is there because
            other ranks may have one.
        absent: what such a `.grad` is filled with. Zero; NaN in a step that is being discarded, so
            that a rank that does not discard it sees at once that it has no mean.
    """

    def __init__(self, module: nn.Module, reduction: Reduction):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        names = full_names(module)
        self.names = [names[p] for p in self.parameters]
        self.dtypes = GradientDtypes(self.parameters)
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._reduction = reduction
        self.reduced: set[int] = set()
        self.filled: set[int] = set()
        self.begin_step()

    def begin_step(self) -> None:
        self.absent = 0.0
        self.clear_filled()

    def describe(self) -> list[Gradient]:
        """Returns the sizes and dtypes from which a plan is made."""
        return [
            Gradient(p.numel(), str(dtype), dtype.itemsize)
            for p, dtype in zip(self.parameters, self.dtypes.all, strict=True)
        ]

    def index_of(self, parameter: Tensor) -> int:
        """Returns the index of a parameter; -1 of any other tensor."""
        return self._index.get(id(parameter), -1)

    def show(self, indices: Iterable[int]) -> str:
        return ", ".join(self.names[i] for i in indices)

    def local(self, i: int) -> Tensor:
        """Returns this rank's part of gradient `i`: its contiguous `.grad`, or zeros."""
        parameter = self.parameters[i]
        if parameter.grad is None:
            self.filled.add(i)
            dtype = self.dtypes.all[i]
            parameter.grad = parameter.new_full(parameter.shape, self.absent, dtype=dtype)
        elif not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()  # ranks may hold different strides
        return parameter.grad

    def make_local(self, *indices: int) -> None:
        """Makes each `.grad` this rank's part again, in the dtype that is reduced."""
        self.dtypes.conform(*indices)
        for i in self.reduced.intersection(indices):
            self.reduced.discard(i)
            if (held := self.parameters[i].grad) is not None:
                self.parameters[i].grad = self.share_of(i, held)

    def share_of(self, i: int, held: Tensor) -> Tensor:
        """Returns this rank's part of reduced gradient `i`, which is `held`, perhaps in place."""
        if self._reduction.name == "sum" and self._reduction.contributors > 1:
            held.div_(self._reduction.contributors)
        return held

    def settle(self, i: int) -> None:
        """Notes that a backward has added to `.grad`, which holds this rank's part alone.

        Raises:
            RuntimeError: for a gradient that is sparse or of another dtype than is reduced.
        """
        gradient = self.parameters[i].grad
        assert gradient is not None
        if gradient.dtype != self.dtypes.all[i] or gradient.layout != torch.strided:
            self._refuse(i, gradient)
        self.reduced.discard(i)

    def _refuse(self, i: int, gradient: Tensor) -> None:
        name, dtype = self.names[i], self.dtypes.all[i]
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"{name} has a sparse gradient, which no variant reduces: build its embedding with "
                "sparse=False"
            )
        what = f"{name} has a gradient of {gradient.dtype} in place of {dtype}"
        if self.dtypes.least is None:
            raise RuntimeError(f"{what}: set the parameter's grad_dtype before it is wrapped")
        raise RuntimeError(
            f"gradient_ready: {what}: call before_gradient, then assign one of that type"
        )

    def clear_filled(self, used: Iterable[int] = ()) -> None:
        """Takes away what was filled, but for parameters that some rank has used."""
        for i in self.filled.difference(used):
            self.parameters[i].grad = None
        self.filled.clear()

    def restore_strides(self) -> None:
        """Gives gradients the strides of their parameters, which optimizers expect.

        Collectives need contiguous gradients.
        """
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or parameter.is_contiguous() or not any(gradient.stride()):
                continue  # a stand-in has the memory of one element
            if gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)

    def drop(self) -> None:
        """Discards all gradients; later reductions of them give NaN."""
        self.absent = torch.nan
        for parameter in self.parameters:
            parameter.grad = None


def full_names(module: nn.Module) -> dict[Parameter, str]:
    """Returns `{parameter: name}`, a tied parameter under all its names."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {parameter: " = ".join(all_names) for parameter, all_names in names.items()}
