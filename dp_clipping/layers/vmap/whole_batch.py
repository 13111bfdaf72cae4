"""A module's own parameters, in its forward on the whole batch, without vmap.

    w [C], x [B, T, C]      y = w · x = v · x,  with v [B, 1, C] a copy of w for every sample

The copies are one tensor expanded to [B, *parameter]; under ordinary autograd their gradient is G.
So an operator between a parameter and a tensor of the batch needs no vmap, if it is known which
dimension of the tensor counts the samples. That is learned from forwards of two batch sizes, as it
is for layers (`batch_layout`), for every such operator in the order of the calls:

    w + x, w - x, w · x, x / w      the copies are laid beside the samples of x
    w.expand(B, ..), w.repeat       the copies are what is returned
    w.view(..), w[:n], w.to(..)     of parameters alone: the same for each copy

`capture.vmap_trial` compares results and G with those under vmap, before a step relies on it, and
`guard.observer` looks at the rows of each such operator when it looks at those of layers: a row
that is another sample's there would get that sample's copy. A module that computes anything else
with a parameter, in the trial or in a later step, runs under vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dp_clipping.distributed.dtensor import owner_of
from dp_clipping.layers.batch_layout import FEW, MORE
from dp_clipping.torch_compat import own_parameters, tree_leaves, tree_map

_OPERATORS = ("add", "sub", "mul", "div")  # as Python's +, -, *, / and their in-place forms call
ELEMENTWISE = {getattr(owner, name) for owner in (torch, Tensor) for name in _OPERATORS}
IN_PLACE = {getattr(Tensor, f"{name}_") for name in _OPERATORS}
EXPANDING = {Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to}
SAME_ORDER = {Tensor.view, Tensor.reshape, Tensor.unsqueeze, Tensor.squeeze, Tensor.flatten}
SAME_ORDER |= {torch.reshape, torch.unsqueeze, torch.squeeze, torch.flatten}
FACTS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}
_FACTS = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "itemsize")
FACTS |= {getattr(Tensor, name).__get__ for name in _FACTS}


class UnknownOperation(Exception):
    """A module computes with a parameter of its own otherwise than it is known to."""


class Operation(NamedTuple):
    """An operation between a parameter and a tensor of the batch.

    Attributes:
        function: of torch.
        shape: of the tensor; of the result where it is the parameter that is expanded. Once it has
            been learned, the number of its dimensions and the one that counts the samples.
    """

    function: Callable[..., Any]
    shape: tuple[int, ...]


Watch = Callable[[str, Tensor, int], Tensor]
"""`watch(what, x, dim)` -> x, or x + 0: an operator's `"operand"`, before the operator, and its
`"result"`; `"written"` is a result that is the operand itself, and returned as such."""


class Call:
    """One forward of a module whose own parameters are `Own`.

    Args:
        batch_size: rows of the batch.
        known: the operations of the parameters with the batch, in order; None: the call is a trial.
        watch: sees the tensors of the batch in these operations.

    Attributes:
        operations: those so far.
        name: of the module, and its class.
        is_over: the forward has returned.
    """

    def __init__(
        self, batch_size: int, known: tuple[Operation, ...] | None, watch: Watch | None = None
    ):
        self.batch_size, self.operations = batch_size, list[Operation]()
        self.name, self.is_over = "", False
        self._known, self._watch = known, watch

    def refusal(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} computes with a parameter of its own in a torch.autograd.Function, "
            "through code that is not PyTorch's operators, or after its forward has returned, so "
            "its per-sample gradients would miss that: return what is computed of the parameter "
            "from forward, as return y, self.scale * y, and call model.reset_batch_layouts() "
            "before a forward that computes otherwise than the first one"
        )

    def refuse_if_over(self) -> None:
        if self.is_over:
            raise self.refusal()

    def watched(self, what: str, x: Tensor, dim: int) -> Tensor:
        return x if self._watch is None else self._watch(what, x, dim)

    def dim_of(self, function: Callable[..., Any], shape: torch.Size) -> int:
        """Returns which dimension of this shape counts the samples; in a trial it is looked for."""
        number = len(self.operations)
        self.operations.append(Operation(function, tuple(shape)))
        if self._known is None:
            return 0
        if number == len(self._known):
            raise UnknownOperation
        expected, (dims, dim) = self._known[number]
        if expected is not function or len(shape) != dims or shape[dim] != self.batch_size:
            raise UnknownOperation
        return dim

    def check_end(self, outputs: Any) -> None:
        """Raises UnknownOperation if operations are missing, or if a parameter is returned."""
        is_short = self._known is not None and len(self.operations) < len(self._known)
        if is_short or any(isinstance(y, Own) for y in tree_leaves(outputs)):
            raise UnknownOperation


class Own(Tensor):
    """A parameter, or what was computed of parameters alone, in one call of its module.

    Operators get to `__torch_function__`. A gradient of the value itself would come of something
    that does not, and be missing in G: it is refused.

    Attributes:
        call: the call.
        copies: [B, *shape], its value for each sample; None: the values alone are computed with.
    """

    call: Call
    copies: Tensor | None

    @staticmethod
    def of(value: Tensor, call: Call, copies: Tensor | None) -> Own:
        value = value.detach()  # `requires_grad` is asked for, and it has none of its own
        if copies is not None and copies.requires_grad:
            value = _Unseen.apply(copies, value, call)
        elif value.is_floating_point():
            value.requires_grad_()
        own = value.as_subclass(Own)
        own.call, own.copies = call, copies
        return own

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in FACTS:
            return function(*map(_value, args), **kwargs)
        leaves = tree_leaves((args, kwargs))
        owns = [x for x in leaves if isinstance(x, Own)]
        for own in owns:
            own.call.refuse_if_over()
        others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Own)]
        if not owns or not args:
            raise UnknownOperation
        if function in EXPANDING and args[0] is owns[0]:
            return _expanded(owns[0], function, args, kwargs)
        if not others:
            return _of_parameters(owns, function, args, kwargs)
        is_pair = len(owns) == len(others) == 1 and len(args) == 2 and not kwargs
        is_elementwise = function in ELEMENTWISE or (function in IN_PLACE and args[0] is others[0])
        if is_pair and is_elementwise:
            return _beside_samples(owns[0], others[0], function, args)
        raise UnknownOperation


class _Unseen(torch.autograd.Function):
    """A parameter's value, whose gradient is refused: it should have come to the copies."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, value: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.call.refusal()


def _expanded(own: Own, function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Returns a parameter that is expanded to the batch: copies, one for each sample."""
    given = [_value(x) for x in args]
    with torch.no_grad():
        shape = function(*given, **kwargs).shape
    dim = own.call.dim_of(function, shape)
    if own.copies is None:
        return own.call.watched("result", function(*given, **kwargs), dim)
    copies = laid_beside(own.copies, len(shape), dim)
    if any(a not in (1, b) for a, b in zip(reversed(copies.shape), reversed(shape), strict=False)):
        raise UnknownOperation  # `repeat` of several values
    copies = copies.expand(shape)
    return copies.clone() if function is Tensor.repeat else copies  # which may be written to


def _of_parameters(owns: list[Own], function: Callable, args: tuple, kwargs: dict) -> Any:
    """Returns what is computed of parameters alone: the same function of each sample's copies."""
    call, name = owns[0].call, getattr(function, "__name__", "_")
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place or name == "__setitem__" or "out" in kwargs:  # it writes to the parameter
        raise UnknownOperation
    with torch.no_grad():
        value = function(*tree_map(_value, args), **tree_map(_value, kwargs))
    if not isinstance(value, Tensor):
        raise UnknownOperation
    copies = [own.copies for own in owns if own.copies is not None]
    if not copies:
        return Own.of(value, call, None)
    if function in SAME_ORDER and len(copies) == 1:
        return Own.of(value, call, copies[0].reshape(len(copies[0]), *value.shape))

    def of_sample(*rows: Tensor) -> Tensor:
        left = iter(rows)
        put = lambda x: next(left) if isinstance(x, Own) else x  # noqa: E731
        return function(*tree_map(put, args), **tree_map(put, kwargs))

    return Own.of(value, call, torch.vmap(of_sample, randomness="different")(*copies))


def _beside_samples(own: Own, x: Tensor, function: Callable, args: tuple) -> Tensor:
    """Returns an elementwise operator of a parameter and a tensor of the batch."""
    dim = own.call.dim_of(function, x.shape)
    if own.copies is None:
        own.call.watched("operand", x, dim)
        y = function(*map(_value, args))
        return own.call.watched("written" if y is x else "result", y, dim)
    copies = laid_beside(own.copies, x.dim(), dim)
    y = function(*[copies if arg is own else arg for arg in args])
    return y if own.dim() else y.to(torch.result_type(x, _value(own)))  # a number widens nothing


def laid_beside(copies: Tensor, dims: int, dim: int) -> Tensor:
    """Returns copies [B, *shape] that broadcast with a tensor of `dims` dimensions.

    Raises:
        UnknownOperation: where the parameter has a dimension of its own there.
    """
    shape, behind = copies.shape[1:], dims - dim - 1  # dimensions behind that of the samples
    if len(shape) <= behind:
        return copies.reshape(len(copies), *(1,) * (behind - len(shape)), *shape)
    place = len(shape) - behind - 1
    if shape[place] != 1:
        raise UnknownOperation
    return copies.squeeze(place + 1).movedim(0, place)


def _value(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, Own) else x


@contextmanager
def replaced(module: nn.Module, call: Call, copies: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Enters a context in which the module's own parameters are `Own`, with these copies.

    FSDP1 lays plain tensors over parameters, as attributes that are found first: these too.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, rows in copies.items():
            owner, name = owner_of(module, path)
            own = Own.of(getattr(owner, name), call, rows)
            places: tuple[dict[str, Any], ...] = (own_parameters(owner), vars(owner))
            for place in places:
                if name in place:
                    before.append((place, name, place[name]))
                    place[name] = own
        yield
    finally:
        for place, name, parameter in before:
            place[name] = parameter


def learned(few: list[Operation], more: list[Operation]) -> tuple[Operation, ...]:
    """Returns the operations that calls with `FEW` and with `MORE` samples have in common.

    Raises:
        UnknownOperation: it is not one dimension that counts the samples, or the calls differ.
    """
    if len(few) != len(more):
        raise UnknownOperation
    found = []
    for one, other in zip(few, more, strict=True):
        sizes = list(zip(one.shape, other.shape, strict=False))
        grown = [n for n, pair in enumerate(sizes) if pair == (FEW, MORE)]
        others = [n for n, (a, b) in enumerate(sizes) if a != b]
        if one.function is not other.function or len(one.shape) != len(other.shape):
            raise UnknownOperation
        if len(grown) != 1 or others != grown:
            raise UnknownOperation
        found.append(Operation(one.function, (len(one.shape), grown[0])))
    return tuple(found)
