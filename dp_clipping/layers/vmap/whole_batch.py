"""Runs a module on the whole batch, with a copy of its own parameters for each sample.

    w [C], x [B, T, C]      y = w · x = v · x,  with v [B, 1, C] a copy of w for every sample

The copies are one tensor expanded to [B, *parameter]; under ordinary autograd their gradient is G.
Child layers that the module calls get tensors of the batch, and deliver their own gradients.

So each operator between a parameter and tensors of the batch must know which dimension of these
counts the samples. That is learned from forwards of two batch sizes, as it is for layers
(`batch_layout`), for every such operator in the order of the calls:

    w + x, w - x, w · x, x / w      the copies are laid beside the samples of x
    w.expand(B, ..), w.repeat       the copies are what is returned
    attention with a mask w         the copies are the masks of the samples
    any other, as x @ w             runs under `torch.vmap`, by itself
    of parameters alone             likewise, also with tensors that all samples share; views, rows
                                    and elementwise operators are those of all copies at once

`capture.vmap_trial` compares results and G with autograd's before a step relies on them, and
`guard.observer` looks at the rows of each operator when it looks at those of layers: a row that is
another sample's there would get that sample's copy. A module in which samples have no place of
their own in an operator runs under vmap as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dp_clipping.distributed.dtensor import owner_of
from dp_clipping.layers.batch_layout import FLATTENED, Layout, find_layout
from dp_clipping.layers.handle import LayerState, expanded_output, plain_forward
from dp_clipping.layers.vmap.own import (
    ELEMENTWISE,
    OPERATORS,
    Own,
    UnknownOperation,
    at_once,
    laid_beside,
    refuse_other_number,
    replaced,
    rows_of_table,
    value_of,
)
from dp_clipping.torch_compat import tree_flatten, tree_leaves, tree_unflatten

IN_PLACE = {getattr(Tensor, f"{name}_") for name in OPERATORS}
EXPANDING = {Tensor.expand, Tensor.expand_as, Tensor.repeat, torch.broadcast_to}
PLAIN = (Tensor, int, float, torch.dtype, torch.device)  # arguments that hold no tensors
ATTENTION = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
CREATING = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor}
ALONE = Layout("alone")  # [B, *shape], of what has no samples elsewhere: copies of a parameter

Key = tuple[int, Callable[..., Any], tuple[int, ...]]
"""The number of an operator in a call, the operator, and dimensions of its tensors."""


class Operation(NamedTuple):
    """Layouts of the samples in an operator's results and tensors, parameters left out."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    @property
    def is_constant(self) -> bool:
        return all([layout.kind == "shared" for layout in (*self.inputs, *self.outputs)])


class Noted(NamedTuple):
    """An operator that is not known yet: its tensors, but parameters, and its results.

    `has_moved`: some tensors are rows that were picked or sorted by values (`trials.routing`).
    """

    key: Key
    inputs: list[Tensor]
    outputs: list[Tensor]
    has_moved: bool = False


Watch = Callable[[str, Tensor, Layout], Tensor]
"""`watch(what, x, layout)` -> x, or x + 0: an operator's `"operand"`, before the operator, and its
`"result"`; `"written"` is a result that is the operand itself, and returned as such."""


class Call:
    """One forward of a module whose own parameters are `Own`.

    Args:
        name: of the module, and its class.
        rows: of the batch.
        known: the operators of the parameters with tensors of the batch.
        has_moved: others are noted, and their results are tensors without copies; it says whether
            rows of a tensor were picked or sorted. None: others are refused.
        watch: sees the tensors of the batch in known operators.

    Attributes:
        noted: operators that were not known.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        known: Mapping[Key, Operation],
        has_moved: Callable[[Tensor], bool] | None = None,
        watch: Watch | None = None,
    ):
        self.name, self.rows, self._known = name, rows, known
        self._has_moved, self._watch = has_moved, watch
        self.noted: list[Noted] = []
        self._number = 0

    def of(self, module: nn.Module, copies: Mapping[str, Tensor]) -> Call:
        """Returns a context in which the module's own parameters are `Own`, with these copies."""
        own = {
            name: Own.of(rows, self.name, getattr(*owner_of(module, name)))
            for name, rows in copies.items()
        }
        self._replaced = replaced(module, own)
        return self

    def __enter__(self) -> None:
        self._replaced.__enter__()
        Own.calls.append(self)

    def __exit__(self, *raised: Any) -> None:
        Own.calls.pop()
        self._replaced.__exit__(*raised)

    def compute(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns what an operator computes of parameters, and of other tensors if it has some.

        Raises:
            UnknownOperation: where samples are in it is not known.
        """
        is_flat = not kwargs and all([isinstance(x, PLAIN) for x in args])
        leaves, structure = (list(args), None) if is_flat else tree_flatten((args, kwargs))
        is_pair = is_flat and len(args) == 2 and all([isinstance(x, Tensor) for x in args])
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        copies = [x.copies if isinstance(x, Own) else None for x in tensors]
        for x, rows in zip(tensors, copies, strict=True):
            if rows is not None and not rows.requires_grad and value_of(x).requires_grad:
                raise UnknownOperation("a torch.autograd.Function computes with a parameter")
        others = [x for x, rows in zip(tensors, copies, strict=True) if rows is None]
        if not others and function not in EXPANDING:
            return self._of_parameters(function, leaves, structure, kwargs)
        # An `Own` is asked nothing itself, which would come to `__torch_function__`.
        pairs = zip(tensors, copies, strict=True)
        dims = tuple([x.ndim if rows is None else rows.ndim - 1 for x, rows in pairs])
        key = (self._number, function, dims)
        self._number += 1
        known = self._known.get(key)
        if known is None:
            return self._note(key, others, leaves, structure)
        if known.is_constant:
            return self._of_parameters(function, leaves, structure, kwargs)
        for x, layout in zip(others, known.inputs, strict=True):
            count = self.rows if layout.kind == "shared" else x.shape[layout.dim]
            if count % self.rows if layout.kind in FLATTENED else count != self.rows:
                raise UnknownOperation("one of its tensors has another number of rows")
        if function in EXPANDING and isinstance(leaves[0], Own):
            return self._expanded(function, leaves, structure, known.outputs[0])
        is_in_place = function in IN_PLACE and leaves[0] is others[0]
        is_beside = is_pair and (function in ELEMENTWISE or is_in_place)
        if is_beside and known.inputs[0].kind == "dimension":
            return self._beside_samples(function, leaves, others[0], known.inputs[0])
        if function is F.scaled_dot_product_attention and _is_masked(args, kwargs, known):
            for x, layout in zip(others, known.inputs, strict=True):
                self._watched("operand", x, layout)
            mask = laid_beside(kwargs["attn_mask"].copies, args[0].dim(), 0)
            y = function(*args, **{**kwargs, "attn_mask": mask})
            return self._watched("result", y, known.outputs[0])
        _refuse_writing(function, kwargs)
        return self._of_each_sample(function, leaves, structure, known)

    def _note(self, key: Key, inputs: list[Tensor], leaves: list[Any], structure: Any) -> Any:
        _, function, _ = key
        if self._has_moved is None:
            raise UnknownOperation(f"it calls {_name(function)}, and did not in the first batch")
        has_moved = any(map(self._has_moved, inputs))
        inputs = [x.detach().clone() if function in IN_PLACE else x.detach() for x in inputs]
        results = _call(function, map(value_of, leaves), structure)
        outputs = [y.detach() for y in tree_leaves(results) if isinstance(y, Tensor)]
        self.noted.append(Noted(key, inputs, outputs, has_moved))
        return results

    def _watched(self, what: str, x: Tensor, layout: Layout) -> Tensor:
        return x if self._watch is None else self._watch(what, x, layout)

    def _expanded(
        self, function: Callable[..., Any], leaves: list[Any], structure: Any, layout: Layout
    ) -> Tensor:
        """Returns a parameter that is expanded to the batch: copies, one for each sample."""
        with torch.no_grad():
            shape = _call(function, map(value_of, leaves), structure).shape
        copies = laid_beside(leaves[0].copies, len(shape), layout.dim)
        pairs = zip(reversed(copies.shape), reversed(shape), strict=False)
        if shape[layout.dim] != self.rows or any(a not in (1, b) for a, b in pairs):
            raise UnknownOperation("it repeats a parameter otherwise than for each sample")
        copies = copies.expand(shape)
        if function is Tensor.repeat:  # which may be written to
            copies = copies.clone()
        return self._watched("result", copies, layout)

    def _beside_samples(
        self, function: Callable[..., Any], leaves: list[Any], x: Tensor, layout: Layout
    ) -> Tensor:
        """Returns an elementwise operator of a parameter and a tensor of the batch."""
        own = leaves[1] if leaves[0] is x else leaves[0]
        self._watched("operand", x, layout)
        copies = laid_beside(own.copies, x.dim(), layout.dim)
        y = function(*[copies if one is own else one for one in leaves])
        if own.copies.ndim == 1:  # a number widens nothing
            y = y.to(torch.result_type(x, value_of(own)))
        return self._watched("written" if y is x else "result", y, layout)

    def _of_parameters(
        self, function: Callable[..., Any], leaves: list[Any], structure: Any, kwargs: dict
    ) -> Any:
        """Returns what is computed of parameters alone: the same function of each sample's copies.

        What is no tensor, as a number, is the same for all of them, and has no gradient.
        """
        _refuse_writing(function, kwargs)
        results = _call(function, map(value_of, leaves), structure)
        if (copies := at_once(function, leaves, results)) is not None:
            return Own.of(copies, self.name)
        parts, made = tree_flatten(results)
        places = [n for n, y in enumerate(parts) if isinstance(y, Tensor)]
        if not places or function in CREATING:
            return results
        alone = {n: ALONE for n, x in enumerate(leaves) if isinstance(x, Own)}
        rows = _under_vmap(function, leaves, structure, self.rows, alone, (ALONE,) * len(places))
        for n, row in zip(places, rows, strict=True):
            parts[n] = Own.of(row, self.name)
        return tree_unflatten(parts, made)

    def _of_each_sample(
        self, function: Callable[..., Any], leaves: list[Any], structure: Any, known: Operation
    ) -> Any:
        """Returns what an operator computes of each sample and its copies."""
        layouts, where = dict[int, Layout](), iter(known.inputs)
        for n, x in enumerate(leaves):
            if isinstance(x, Own):
                layouts[n] = ALONE
            elif isinstance(x, Tensor) and (layout := next(where)).kind != "shared":
                layouts[n] = layout
                self._watched("operand", x, layout)
        found = _under_vmap(function, leaves, structure, self.rows, layouts, known.outputs)
        pairs = zip(found, known.outputs, strict=True)
        ys = [self._watched("result", y, layout) for y, layout in pairs]
        return ys[0] if len(ys) == 1 else tuple(ys)


def on_whole_batch(
    self: Any, call: Call, copies: Mapping[str, Tensor], args: tuple, kwargs: dict
) -> Any:
    """Returns a module's output on the whole batch; see `whole_batch`.

    Args:
        copies: [B, *parameter] of each that the module captures.

    Raises:
        UnknownOperation: it computes otherwise with its parameters than `call` knows.
        ValueError: in a private step it returns another number of tensors than is known.
    """
    handle: LayerState = self._private
    inputs = handle.tensors((args, kwargs))
    known = handle.output_layouts.get(tuple([x.dim() for x in inputs]))
    with call.of(self, copies):
        outputs = plain_forward(self, *args, **kwargs)
        if known is not None and handle.private_step is not None:
            refuse_other_number(self, {len(handle.tensors(outputs))}, len(known), outputs)
        outputs = expanded_output(handle, inputs, outputs, call.rows)
    if any([isinstance(y, Own) for y in tree_leaves(outputs)]):
        raise UnknownOperation("it returns a parameter in the place of samples")
    return outputs


def _is_masked(args: tuple, kwargs: dict, known: Operation) -> bool:
    """Returns whether a mask is all of attention that is of parameters, and samples come first."""
    mask = kwargs.get("attn_mask")
    first = [layout.kind == "dimension" and not layout.dim for layout in known.inputs]
    is_alone = len(args) == len(first) == 3 and isinstance(mask, Own)
    return is_alone and all(first) and not kwargs.get("dropout_p")


def _under_vmap(
    function: Callable[..., Any], leaves: list[Any], structure: Any, batch_size: int,
    layouts: dict[int, Layout], outputs: tuple[Layout, ...],
) -> list[Tensor]:  # fmt: skip
    """Returns an operator's tensors, computed for each sample and joined.

    Args:
        layouts: place among `leaves` -> where samples are in a tensor that has some.
        outputs: where they are in what is returned.
    """

    def of_sample(*rows: Tensor) -> tuple[Tensor, ...]:
        mine = list(leaves)
        for n, row in zip(layouts, rows, strict=True):
            mine[n] = row
        found = tree_leaves(_call(function, mine, structure))
        return tuple([y for y in found if isinstance(y, Tensor)])

    pairs = [(leaves[n], layout) for n, layout in layouts.items()]
    rows = [x.copies if isinstance(x, Own) else at.split(x, batch_size) for x, at in pairs]
    function = rows_of_table if function is F.embedding else function
    # Other kernels do not notice under vmap that a mask needs a gradient.
    with sdpa_kernel(SDPBackend.MATH) if function in ATTENTION else nullcontext():
        found = torch.vmap(of_sample, randomness="different")(*rows)
    for y, layout in zip(found, outputs, strict=True):
        if layout.kind == "dimension" and y.shape[layout.dim + 1] != 1:
            raise UnknownOperation(f"{_name(function)} returns no row for a sample")
    return [layout.joined(y) for y, layout in zip(found, outputs, strict=True)]


def _call(function: Callable[..., Any], leaves: Iterable[Any], structure: Any) -> Any:
    """Calls a function; without a structure the leaves are its arguments."""
    if structure is None:
        return function(*leaves)
    args, kwargs = tree_unflatten(list(leaves), structure)
    return function(*args, **kwargs)


def _refuse_writing(function: Callable[..., Any], kwargs: dict) -> None:
    """Raises UnknownOperation for an operator that writes to a tensor."""
    name = _name(function)
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place or name == "__setitem__" or kwargs.get("out") is not None:
        raise UnknownOperation(f"{name} writes to a tensor")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "an operator")


def learn(known: dict[Key, Operation], few: list[Noted], more: list[Noted]) -> bool:
    """Adds the operators that calls with `FEW` and with `MORE` samples have in common to `known`.

    Returns False at one of tensors that all samples share: operators behind it are others once
    it is known, since its result has copies then.

    Raises:
        UnknownOperation: samples have no place of their own in an operator, or the calls differ.
    """
    for one, other in zip_longest(few, more):
        if one is None or other is None or one.key != other.key:
            raise UnknownOperation("it calls other operators for a batch of another size")
        name = _name(one.key[1])
        if one.has_moved:
            raise UnknownOperation(f"{name} gets rows that were picked or sorted by their values")
        try:
            operation = Operation(
                *(
                    tuple(
                        find_layout(*pair, f"a tensor of {name}")
                        for pair in zip(*sides, strict=True)
                    )
                    for sides in ((one.inputs, other.inputs), (one.outputs, other.outputs))
                )
            )
        except ValueError as error:
            raise UnknownOperation(str(error)) from error
        if known.setdefault(one.key, operation) != operation:
            raise UnknownOperation(f"samples are in other places in other calls of {name}")
        if operation.is_constant:
            return False
        is_made = all(layout.kind == "shared" for layout in operation.inputs)
        if any(layout.kind == "shared" for layout in operation.outputs) or (
            is_made and one.key[1] not in EXPANDING
        ):
            raise UnknownOperation(f"{name} has rows of samples on one side alone")
    return True
