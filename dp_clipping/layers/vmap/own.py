"""A module's parameters with a copy for each sample, as its code is given them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.distributed.dtensor import owner_of
from dp_clipping.layers.batch_layout import LayoutUnknown
from dp_clipping.torch_compat import apply_directly, own_parameters, transforms_run, tree_map
from dp_clipping.trials.holders import lists_in

LOG = logging.getLogger(__name__)
SAME_ORDER = {Tensor.view, Tensor.reshape, Tensor.unsqueeze, Tensor.squeeze, Tensor.flatten}
SAME_ORDER |= {torch.reshape, torch.unsqueeze, torch.squeeze, torch.flatten, Tensor.contiguous}
PERMUTING = {Tensor.permute, torch.permute}
AS_IT_IS = [None, None, 2.0, False, False]  # arguments of `F.embedding` behind ids and table
OPERATORS = ("add", "sub", "mul", "div")  # as Python's +, -, *, / and their in-place forms call
ELEMENTWISE = {getattr(owner, name) for owner in (torch, Tensor) for name in OPERATORS}
FACTS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}
_FACTS = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "itemsize")
FACTS |= {getattr(Tensor, name).__get__ for name in _FACTS}
# Of recurrent layers: the weights that they were called with last, and weak references to them. If
# these are others, the next forward moves all weights to other memory on a GPU.
LISTS_OF_WEIGHTS = ("_flat_weights", "_flat_weight_refs")


class UnknownOperation(Exception):
    """A module computes with a parameter of its own otherwise than it is known to; says how."""


class Own(Tensor):
    """A parameter, or what was computed of parameters alone, in a call of its module.

    Operators get to `__torch_function__`. A gradient of the value itself would come of something
    that does not, and be missing in G: it is refused.

    Attributes:
        copies: [B, *shape], its value for each sample.
        calls: of modules whose own parameters are `Own` (`whole_batch.Call`), the inner one last.
    """

    copies: Tensor
    calls: ClassVar[list[Any]] = []

    @staticmethod
    def of(copies: Tensor, name: str, parameter: Tensor | None = None) -> Own:
        """Returns an `Own`. With a parameter, the module's code takes it for that."""
        value = copies[0].detach()
        if copies.requires_grad:
            run = _Unseen.apply if transforms_run() else _unseen
            value = run(copies, value, name)
        own = value.as_subclass(Own)
        if parameter is not None:
            own = taken_for(own, parameter)
        own.copies = copies
        return own

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in FACTS:
            return function(*map(value_of, args), **kwargs)
        if not Own.calls:
            return function(*tree_map(value_of, args), **tree_map(value_of, kwargs))
        return Own.calls[-1].compute(function, args, kwargs)


class _Unseen(torch.autograd.Function):
    """A parameter's value, whose gradient is refused: it should have come to the copies."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name} computes with a parameter of its own in a torch.autograd.Function, "
            "through code that is not PyTorch's operators, or after its forward has returned, so "
            "its per-sample gradients would miss that: return what is computed of the parameter "
            "from forward, as return y, self.scale * y, and call model.reset_batch_layouts() "
            "before a forward that computes otherwise than the first one; where ranks share its "
            'parameters, use wrap("zero2", network) for a torch.autograd.Function'
        )


_unseen = apply_directly(_Unseen)


def taken_for(x: Tensor, parameter: Tensor) -> Any:
    """Returns x such that code takes it for a parameter: of its class, with its attributes."""
    kind = type(parameter)
    if issubclass(kind, nn.Parameter):  # another tensor's class may keep its values in attributes
        if kind is not nn.Parameter:
            x = x.as_subclass(_own_class(kind) if isinstance(x, Own) else kind)
        vars(x).update(vars(parameter))
    if isinstance(parameter, nn.Parameter):
        x._is_param = True  # as `isinstance(x, nn.Parameter)` asks
    return x


@cache
def _own_class(kind: type) -> Any:
    """Returns a class of `Own` with the methods of a class of parameters."""
    return type(kind)(kind.__name__, (Own, kind), {})


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
        raise UnknownOperation("a parameter has a dimension of its own in the place of the samples")
    return copies.squeeze(place + 1).movedim(0, place)


def at_once(function: Callable[..., Any], leaves: list[Any], results: Any) -> Tensor | None:
    """Returns what an operator computes of all copies at once; None for one that is not known so.

    Args:
        results: what it computes of the parameters.
    """
    if not isinstance(results, Tensor):
        return None
    own, rest, dims = leaves[0], leaves[1:], results.ndim
    if function in SAME_ORDER:
        return own.copies.reshape(own.copies.shape[0], *results.shape)
    if function in PERMUTING:
        return own.copies.permute(0, *[dim % dims + 1 for dim in rest])
    if function is F.embedding and type(own) is Tensor and leaves[2:] == AS_IT_IS:
        own, rest, function = leaves[1], leaves[:1], Tensor.__getitem__
    if function is Tensor.__getitem__ and len(rest) == 1 and type(rest[0]) is Tensor:
        (ids,) = rest
        if ids.dtype != torch.int64:  # a mask, or bytes, which are one
            return None
        rows = own.copies.index_select(1, (ids % own.copies.shape[1]).flatten())
        return rows.view(rows.shape[0], *results.shape)
    if function in ELEMENTWISE or function is torch.where:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if all([x.dtype in (results.dtype, torch.bool) for x in map(value_of, tensors)]):
            rows = [
                x.copies.reshape(-1, *[1] * (dims + 1 - x.copies.ndim), *x.copies.shape[1:])
                if isinstance(x, Own) else x for x in leaves
            ]  # fmt: skip
            return function(*rows)
    return None


def rows_of_table(
    ids: Tensor, table: Tensor, padding_idx: int | None = None, *others: Any, **named: Any
) -> Tensor:
    """Looks up rows as `F.embedding`, whose padding has no gradient under vmap either.

    PyTorch looks up the copies of all samples as one table there, and knows the padding of the
    first one only.
    """
    rows = F.embedding(ids, table, None, *others, **named)
    if padding_idx is None:
        return rows
    is_padding = ids == padding_idx % table.shape[0]
    return rows.detach().where(is_padding.unsqueeze(-1), rows)


def value_of(x: Any) -> Any:
    """Returns the value of an `Own`, and anything else as it is."""
    return x.as_subclass(Tensor) if isinstance(x, Own) else x


@contextmanager
def replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Enters a context in which a module has these tensors in the place of parameters.

    FSDP1 lays plain tensors over parameters, as attributes that are found first: these too.
    Recurrent layers list the weights that they were called with last: the lists are put back.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, tensor in tensors.items():
            owner, name = owner_of(module, path)
            own = vars(owner)
            before += [(own, one, own[one]) for one in LISTS_OF_WEIGHTS if one in own]
            places: tuple[dict[str, Any], ...] = (own_parameters(owner), own)
            for place in places:
                if name in place:
                    before.append((place, name, place[name]))
                    place[name] = tensor
        yield
    finally:
        for place, name, parameter in reversed(before):
            place[name] = parameter


def refuse_other_number(module: Any, counts: set[int], known: int, output: Any) -> None:
    """Raises an error if a module returns other numbers of tensors than is known.

    Transformers' models of speech list the outputs of layers, of which some are left out at random
    (LayerDrop). Such lists are empty from then on.

    Args:
        counts: how many it has returned, of each sample.
        output: what it has returned.

    Raises:
        LayoutUnknown: where the samples are has to be found again, without its lists.
        ValueError: it has no lists.
    """
    if counts == {known}:
        return
    handle = module._private
    if lists_in(output) and not handle.varies:
        handle.varies = True
        LOG.warning(
            "%s does not list as many tensors in each forward: in private steps its lists are "
            "empty", handle.title(module),
        )  # fmt: skip
        raise LayoutUnknown(handle.name)
    raise ValueError(
        f"{handle.title(module)} returns {' or '.join(map(str, sorted(counts)))} tensors, and "
        f"{known} when its samples were looked for: let it return the same for every batch, or "
        "call model.reset_batch_layouts() before one that differs"
    )
