"""Runs child layers of a module under vmap outside of vmap, on the whole batch.

A module that owns a bare parameter runs under `torch.vmap` (see `module`), where its own code gets
one sample. A layer that it calls would get one sample too, and would need a batching rule for each
of its operators. Instead the call runs outside of vmap: inputs get back the batch dimension of an
ordinary forward, the layer computes as in any step, and outputs are one sample's again. That is
exact for every layer that treats samples apart.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, LayoutUnknown, expand_shared
from dp_clipping.torch_compat import (
    Vmap,
    current_vmap,
    outside_of_vmap,
    tree_flatten,
    tree_unflatten,
)

Forward = Callable[..., Any]


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a child's own forward; captured layers in it run theirs."""
    return type(self).forward(self, *args, **kwargs)


def leaves_vmap(run: Forward) -> Forward:
    """Returns a layer's forward that may be called from a captured module under vmap too."""

    @wraps(run)
    def anywhere(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle: LayerState = vars(self)["_private"]
        is_captured = handle.private_step is not None or handle.trial is not None
        vmap = current_vmap() if is_captured else None
        if vmap is None:
            return run(self, *args, **kwargs)
        return _on_whole_batch(run, self, vmap, args, kwargs)

    return anywhere


def _on_whole_batch(run: Forward, module: nn.Module, vmap: Vmap, args: tuple, kwargs: dict) -> Any:
    handle: LayerState = vars(module)["_private"]
    leaves, structure = tree_flatten((args, kwargs))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[n] for n in places]
    layouts = handle.layouts_of(tensors)
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
