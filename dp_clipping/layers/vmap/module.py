"""Runs any other module under `torch.vmap`, each sample with a copy of the parameters.

The copies are one tensor expanded to [B, *parameter], which takes no memory; its gradient under
ordinary autograd is G. Nothing is derived by hand, so this is right for every module that treats
samples apart, and costs what G costs. Modules that own a bare parameter come here. Where possible
they run without their child layers (`children`), or without vmap (`whole_batch`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dp_clipping.distributed.dtensor import owner_of
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import (
    LayerState,
    LayoutUnknown,
    check_size,
    plain_forward,
    rows_unknown,
)
from dp_clipping.layers.tensor_parallel import refuse_distributed, settled
from dp_clipping.layers.vmap.attention import BatchedAttention
from dp_clipping.layers.vmap.refusals import refusal_of
from dp_clipping.layers.vmap.whole_batch import Call, UnknownOperation, replaced
from dp_clipping.torch_compat import own_parameters, tree_flatten, tree_unflatten


class Body(nn.Module):
    """The module's own forward, without its hooks, which run around the captured call already."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return plain_forward(self.module, *args, **kwargs)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    handle: LayerState = self._private
    if handle.private_step is None:
        if handle.trial is not None:
            return handle.trial(every_sample, self, args, kwargs)
        return plain_forward(self, *args, **kwargs)
    slots = {name: handle.slot(name) for name in handle.trainable}
    batch_size = handle.private_step.batch_size
    if handle.whole_batch and handle.examples_per_unit == 1:
        known = handle.whole_batch.get(tuple([x.dim() for x in handle.tensors((args, kwargs))]))
        if known is not None:
            try:
                return on_whole_batch(self, Call(batch_size, known), slots, args, kwargs)
            except UnknownOperation as error:
                handle.whole_batch = None  # from now on it runs under vmap
                raise LayoutUnknown(handle.name) from error
    return every_sample(self, slots, batch_size, args, kwargs)


def on_whole_batch(
    self: nn.Module, call: Call, copies: Mapping[str, Tensor | None], args: tuple, kwargs: dict
) -> Any:
    """Returns a module's output on the whole batch, without vmap; see `whole_batch`.

    Args:
        copies: [B, *parameter] of each that the module captures; None: only values are wanted.

    Raises:
        UnknownOperation: it computes otherwise with its parameters than `call` knows.
    """
    call.name = f"{self._private.name or 'the network'} ({type(self).__name__})"
    try:
        with replaced(self, call, copies):
            outputs = plain_forward(self, *args, **kwargs)
    finally:
        call.is_over = True
    call.check_end(outputs)
    return outputs


def every_sample(
    self: nn.Module, copies: dict[str, Tensor], batch_size: int, args: tuple, kwargs: dict
) -> Any:
    """Returns a module's output for each sample with its own copy of the parameters, joined.

    Args:
        copies: [B, *parameter] of each that the module captures.
        args, kwargs: of the whole batch.
    """
    handle: LayerState = self._private
    leaves, structure = tree_flatten((args, kwargs))
    leaves = [settled(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    owners = [owner_of(self, name) for name in handle.trainable]
    own = [getattr(*owner) for owner in owners]  # what FSDP has put in the parameters' place
    refuse_distributed(handle, *leaves, *(own if handle.children_apart else self.parameters()))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[n] for n in places]
    layouts = handle.layouts_of(tensors)
    out_layouts = handle.output_layouts_of(tensors)
    for x, layout in zip(tensors, layouts, strict=True):
        check_size(x, layout, handle, batch_size)
    body = Body(self)
    rest: list[Any] = []  # what is not a tensor in the output, and how it all fits together

    def one_sample(parameters: dict[str, Tensor], *rows: Tensor) -> tuple[Tensor, ...]:
        inputs = list(leaves)
        for n, row, layout in zip(places, rows, layouts, strict=True):
            inputs[n] = row.unsqueeze(layout.dim) if layout.kind == "dimension" else row
        sample_args, sample_kwargs = tree_unflatten(inputs, structure)
        prefixed = {f"module.{name}": value for name, value in parameters.items()}
        found = functional_call(
            body, prefixed, sample_args, sample_kwargs, tie_weights=not handle.children_apart
        )
        outputs, shape = tree_flatten(found)
        rest[:] = [[None if isinstance(y, Tensor) else y for y in outputs], shape]
        found = [y for y in outputs if isinstance(y, Tensor)]
        rest.append([n for n, y in enumerate(outputs) if isinstance(y, Tensor)])
        if len(found) != len(out_layouts):
            raise ValueError(
                f"{handle.name or 'the network'} ({type(self).__name__}) returns {len(found)} "
                f"tensors, and {len(out_layouts)} when its samples were looked for: let it return "
                "the same for every batch, or call model.reset_batch_layouts() before one that "
                "differs"
            )
        return tuple(
            _one_row(y, layout, handle) for y, layout in zip(found, out_layouts, strict=True)
        )

    run = torch.vmap(
        one_sample,
        in_dims=(dict.fromkeys(handle.trainable, 0), *(_sample_dim(y) for y in layouts)),
        out_dims=tuple(_sample_dim(layout) or 0 for layout in out_layouts),
        randomness="different",
    )
    rows = [layout.split(x, batch_size) for x, layout in zip(tensors, layouts, strict=True)]
    try:
        with _uncovered(owners), BatchedAttention():
            outputs = run(copies, *rows)
    except RuntimeError as error:
        refusal = refusal_of(error, handle.name, self)
        if refusal is None:
            raise
        raise refusal from error
    complete, shape, where = rest
    for n, y, layout in zip(where, outputs, out_layouts, strict=True):
        complete[n] = _join(y, layout, handle.examples_per_unit)
    return tree_unflatten(complete, shape)


def _sample_dim(layout: Layout) -> int | None:
    return None if layout.kind == "shared" else layout.sample_dim()


def _one_row(y: Tensor, layout: Layout, handle: LayerState) -> Tensor:
    """Returns an output of one sample without the dimension that counts samples."""
    if layout.kind != "dimension":
        return y
    if y.shape[layout.dim] != 1:
        raise rows_unknown(handle.name)
    return y.squeeze(layout.dim)


def _join(y: Tensor, layout: Layout, examples_per_unit: int) -> Tensor:
    """Undoes `split` for an output of vmap: moves the samples back to their dimension."""
    if layout.kind == "shared":  # it has a batch now: every sample has its own parameters
        y = y.squeeze(1) if layout.dim else y
        return y if examples_per_unit == 1 else y.repeat_interleave(examples_per_unit, 0)
    return y if layout.kind == "dimension" else y.flatten(layout.dim, layout.dim + 1)


@contextmanager
def _uncovered(owners: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Enters a context in which `functional_call` can replace these parameters.

    The plain tensors that FSDP1 lays over them would be found first.
    """
    covers = [
        (vars(owner), name)
        for owner, name in owners
        if name in vars(owner) and name in own_parameters(owner)
    ]
    values = [attributes.pop(name) for attributes, name in covers]
    try:
        yield
    finally:
        for (attributes, name), value in zip(covers, values, strict=True):
            attributes[name] = value
