"""Runs child layers of a module under vmap outside of vmap, on the whole batch.

A module that owns a bare parameter runs under `torch.vmap` (see `module`), where its own code gets
one sample. A layer that it calls would get one sample too, and would need a batching rule for each
of its operators. Instead the call runs outside of vmap: inputs get back the batch dimension of an
ordinary forward, the layer computes as in any step, and outputs are one sample's again. That is
exact for every layer that treats samples apart.

Of a layer whose call gathers its parameters the whole call does so, with the hooks that gather.

A `Record` runs a module's own code once more without its child layers: they answer as before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ClassVar

from torch import Tensor, nn

from dp_clipping.layers.batch_layout import Layout, is_close
from dp_clipping.layers.handle import (
    LayerState,
    LayoutUnknown,
    expand_shared,
    plain_forward,
)
from dp_clipping.torch_compat import (
    Vmap,
    call_intercepted,
    current_vmap,
    intercept_calls,
    is_of_vmap,
    outside_of_vmap,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Forward = Callable[..., Any]


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a child's own forward; captured layers in it run theirs."""
    return plain_forward(self, *args, **kwargs)


class OtherCalls(Exception):
    """A module's own code has called its child layers otherwise than in the recorded run."""


class Record:
    """The calls of child layers in one run of a module; in further runs these answer alike.

    So a module's own code is tried without running what it calls, which ranks would gather, or
    which remembers that it was called. The answers are constants.

    Attributes:
        inputs: the tensors that child layers are given in the run under way.
    """

    _active: ClassVar[list["Record"]] = []

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self._calls: list[tuple[nn.Module, list[Tensor], Any]] = []
        self._left: list[tuple[nn.Module, list[Tensor], Any]] | None = None
        self._is_in_call = self._compares = False

    @staticmethod
    def of_call(run: Forward) -> Forward:
        """Returns what runs a child's call: `run`, or the record of the run under way."""
        if not Record._active or Record._active[-1]._is_in_call:
            return run
        return partial(Record._active[-1]._call, run)

    @staticmethod
    def is_active() -> bool:
        return bool(Record._active)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enters a context in which the outermost calls of child layers are recorded."""
        self._calls, self._left = [], None
        with self._running():
            yield

    @contextmanager
    def answering(self, compares: bool = False) -> Iterator[None]:
        """Enters a context in which child layers return what they have returned before.

        Args:
            compares: whether their inputs must have the values that they had.

        Raises:
            OtherCalls: they are not called as before.
        """
        self._left, self._compares = list(self._calls), compares
        with self._running():
            yield
        if self._left:
            raise OtherCalls

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.inputs = []
        Record._active.append(self)
        try:
            yield
        finally:
            Record._active.pop()

    def _call(self, run: Forward, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self._left is None:
            before = [x.detach().clone() for x in given]
            self._is_in_call = True
            try:
                outputs = run(module, *args, **kwargs)
            finally:
                self._is_in_call = False
            self._calls.append((module, before, tree_map(_copied, outputs)))
            return outputs
        called, before, outputs = self._left.pop(0) if self._left else (None, [], None)
        if called is not module or [x.shape for x in given] != [x.shape for x in before]:
            raise OtherCalls
        if self._compares and not all(map(is_close, map(_finite, given), map(_finite, before))):
            raise OtherCalls
        self.inputs += given
        return tree_map(_copied, outputs)


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _finite(x: Tensor) -> Tensor:
    """Returns an input of a layer, as an attention mask, without what has no difference."""
    return x.nan_to_num(0, 0, 0)


def let_calls_leave_vmap(module: nn.Module) -> None:
    """Runs calls of a layer outside of vmap with their hooks: those that gather its parameters."""
    intercept_calls(module, partial(leaves_vmap(call_intercepted), module))


def leaves_vmap(run: Forward) -> Forward:
    """Returns a layer's forward that may be called from a captured module under vmap too."""

    @wraps(run)
    def anywhere(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle: LayerState = vars(self)["_private"]
        is_captured = handle.private_step is not None or handle.trial is not None
        vmap = None
        if is_captured or Record.is_active():
            vmap = current_vmap() or _left_vmap(handle, args)
        once = Record.of_call(run)
        if vmap is None:
            return once(self, *args, **kwargs)
        if any(p is not None and is_of_vmap(p) for p in self._parameters.values()):
            # A module around it reads its weight too: it captures all uses, under vmap.
            return plain_forward(self, *args, **kwargs)
        return _on_whole_batch(once, self, vmap, args, kwargs)

    return anywhere


def _left_vmap(handle: LayerState, args: tuple) -> Vmap | None:
    """Returns the vmap that is over and of which an argument is; None: it is of none.

    Activation checkpointing computes a call again in backward, with the tensors that it was given.
    """
    if handle.private_step is None or not any(
        isinstance(x, Tensor) and is_of_vmap(x) for x in args
    ):
        return None
    return Vmap(1, handle.private_step.batch_size)


def _on_whole_batch(run: Forward, module: nn.Module, vmap: Vmap, args: tuple, kwargs: dict) -> Any:
    handle: LayerState = vars(module)["_private"]
    leaves, structure = tree_flatten((args, kwargs))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[n] for n in places]
    layouts = handle.layouts_of(tensors)
    is_shared = not handle.learns_outputs and all(layout.kind == "shared" for layout in layouts)
    if is_shared and Record.is_active():  # the recorded call had no batch either
        with outside_of_vmap():
            return run(module, *args, **kwargs)
    with outside_of_vmap():
        for n, layout in zip(places, layouts, strict=True):
            leaves[n] = _with_batch(leaves[n], layout, vmap, handle)
        args, kwargs = tree_unflatten(leaves, structure)
        leaves, structure = tree_flatten(run(module, *args, **kwargs))
        if handle.learns_outputs:
            layouts = handle.output_layouts_of(tensors)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != len(layouts):
            raise LayoutUnknown(handle.name)
        rows = [
            _by_sample(leaves[n], layout, vmap.batch_size, handle)
            for n, layout in zip(places, layouts, strict=True)
        ]
    for n, one in zip(places, rows, strict=True):
        leaves[n] = leaves[n] if one is None else vmap.wrap(one)
    return tree_unflatten(leaves, structure)


def _with_batch(x: Tensor, layout: Layout, vmap: Vmap, handle: LayerState) -> Tensor:
    """Returns a layer's input as it is in an ordinary forward, from that of one sample.

    Raises:
        LayoutUnknown: it is not one sample's, or samples have their own where all had the same.
    """
    rows, dim = vmap.unwrap(x)
    if layout.kind == "shared":
        if dim is not None:
            raise LayoutUnknown(handle.name)
        is_plain = handle.private_step is None and not handle.learns_outputs
        return expand_shared(x, vmap.batch_size) if is_plain else x
    rows = rows.expand(vmap.batch_size, *x.shape) if dim is None else rows.movedim(dim, 0)
    if layout.kind == "dimension":
        if x.shape[layout.dim] != 1:
            raise LayoutUnknown(handle.name)
        rows = rows.squeeze(layout.dim + 1)
    else:
        rows = rows.movedim(layout.dim + 1, 1)
    return layout.restore(rows)


def _by_sample(y: Tensor, layout: Layout, batch_size: int, handle: LayerState) -> Tensor | None:
    """Returns an output with the samples in front, each as a forward of it alone would have it.

    None: all samples have the same.
    """
    if layout.kind == "shared":
        if handle.kind == "child":
            return None
        if handle.kind == "vectorized" and handle.private_step is None:
            y = expand_shared(y, batch_size)
        rows = y[:: handle.examples_per_unit]  # the same for all examples of a unit
    else:
        rows = layout.batch_first(y, batch_size)
    if len(rows) != batch_size:
        raise LayoutUnknown(handle.name)
    if layout.kind == "shared":
        return rows.unsqueeze(1) if layout.dim else rows
    if layout.kind == "dimension":
        return rows.unsqueeze(layout.dim + 1)
    return rows.movedim(1, layout.dim + 1)
