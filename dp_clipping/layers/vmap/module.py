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
from torch.utils.weak import WeakIdKeyDictionary

from dp_clipping.distributed.dtensor import fsdp_classes, owner_of
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import (
    LayerState,
    LayoutUnknown,
    check_size,
    has_rows,
    plain_forward,
    rows_unknown,
)
from dp_clipping.layers.tensor_parallel import refuse_distributed, settled
from dp_clipping.layers.vmap.attention import BatchedAttention
from dp_clipping.layers.vmap.objects import Objects, Path, exchanged
from dp_clipping.layers.vmap.refusals import reason_of, refusal_of
from dp_clipping.layers.vmap.whole_batch import Call, UnknownOperation, replaced
from dp_clipping.torch_compat import (
    is_passed_on,
    own_parameters,
    tree_flatten,
    tree_unflatten,
    version_of,
)

ALONE = Layout("alone")  # [B, *what one sample has], of a tensor that has no samples elsewhere
WITH_SAMPLES = WeakIdKeyDictionary()  # such tensors in objects -> their layout


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

    Where `torch.vmap` cannot run the module, its samples run one after another.

    Args:
        copies: [B, *parameter] of each that the module captures.
        args, kwargs: of the whole batch. Where the module has effects, objects in them are changed.
    """
    handle: LayerState = self._private
    owners = [owner_of(self, name) for name in handle.trainable]
    call = _OneSample(self, owners, batch_size, args, kwargs)
    if handle.one_by_one:
        with call.objects_put_back_if_it_fails():
            return call.joined(*_in_a_loop(call, copies))
    # Of a trial, which is the first run: no effects may be known, and it may fail half-way.
    before = Objects(self, args, kwargs) if handle.private_step is None else None
    try:
        with call.objects_put_back_if_it_fails(), _uncovered(owners), BatchedAttention():
            run = torch.vmap(
                call,
                in_dims=(dict.fromkeys(handle.trainable, 0), *map(_sample_dim, call.layouts)),
                out_dims=(tuple(_sample_dim(y) or 0 for y in call.out_layouts), 0),
                randomness="different",
            )
            return call.joined(*run(copies, *call.rows))
    except (LayoutUnknown, ValueError):
        raise
    except Exception as error:
        if is_passed_on(error):
            raise
        if not _may_loop(self):
            refusal = refusal_of(error, handle.name, self)
            if refusal is None:
                raise
            raise refusal from error
        if before is not None:
            before.put_back()
        with call.objects_put_back_if_it_fails():
            outputs = call.joined(*_in_a_loop(call, copies))
        handle.one_by_one = reason_of(error)
        return outputs


def _may_loop(module: nn.Module) -> bool:
    """Returns whether a module may run once for each sample.

    Not where its children run on the whole batch, in code that is being traced, or where a child
    gathers its parameters, which other ranks do as often as they have samples.
    """
    if module._private.children_apart or torch.compiler.is_compiling():
        return False
    return not any(isinstance(m, fsdp_classes()) for m in module.modules() if m is not module)


def _in_a_loop(
    call: "_OneSample", copies: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns what `torch.vmap` would, from one call for each sample."""
    dims = [_sample_dim(layout) for layout in call.layouts]
    pairs = list(zip(call.rows, dims, strict=True))
    parameters = {name: copy.unbind(0) for name, copy in copies.items()}
    found, left, given = [], [], []
    with _uncovered(call.owners):
        for n in range(call.batch_size):
            own = {name: values[n] for name, values in parameters.items()}
            # Copies: a write to a view of one sample would count as one to those of the others.
            rows = [x if dim is None else x.select(dim, n).clone() for x, dim in pairs]
            given.append(rows)
            outputs, others = call(own, *rows)
            found.append(outputs)
            left.append(others)
            call.check_alike()
    for (x, dim), rows in zip(pairs, zip(*given, strict=True), strict=True):
        if dim is not None and any(map(version_of, rows)):
            x.copy_(torch.stack(rows, dim))
    out_dims = [_sample_dim(layout) or 0 for layout in call.out_layouts]
    try:
        return (
            tuple(
                torch.stack(y, d) for y, d in zip(zip(*found, strict=True), out_dims, strict=True)
            ),
            tuple(torch.stack(y) for y in zip(*left, strict=True)),
        )
    except RuntimeError as error:
        raise rows_unknown(call.handle.name) from error


class _OneSample:
    """Calls a module with one sample: under `torch.vmap`, or for each sample in turn.

    Attributes:
        owners: of the parameters that it captures: module and name.
        rows: the inputs that have samples or are shared, with a dimension of its own for those.
        layouts: where it is in each.
        out_layouts: where the samples are in the outputs.
    """

    def __init__(
        self, module: nn.Module, owners: list[tuple[nn.Module, str]], batch_size: int,
        args: tuple, kwargs: dict,
    ):  # fmt: skip
        self.module, self.owners, self.batch_size = module, owners, batch_size
        self.handle: LayerState = module._private
        self._args, self._kwargs, self._body = args, kwargs, Body(module)
        given, self._structure = tree_flatten((args, kwargs))
        self._leaves = [settled(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
        own = [getattr(*owner) for owner in owners]  # what FSDP has put in the parameters' place
        all_own = own if self.handle.children_apart else module.parameters()
        refuse_distributed(self.handle, *self._leaves, *all_own)
        self._places = [n for n, leaf in enumerate(given) if isinstance(leaf, Tensor)]
        tensors = [self._leaves[n] for n in self._places]
        self.layouts = list(self.handle.layouts_of(tensors))
        self.out_layouts = self.handle.output_layouts_of(tensors)
        for x, layout in zip(tensors, self.layouts, strict=True):
            check_size(x, layout, self.handle, batch_size)
        self._effects = self.handle.effects_of(tensors)
        self._objects: Objects | None = None
        self._whole = [given[n] for n in self._places]  # what `rows` are of
        if self._effects is not None:
            self._objects = Objects(module, args, kwargs)
            for x, layout in self._held_with_samples():
                self._whole.append(x)
                self.layouts.append(layout)
                tensors.append(x)
        self.rows = [
            layout.split(x, batch_size) for x, layout in zip(tensors, self.layouts, strict=True)
        ]
        self._shown: dict[int, Tensor] = {}  # id of a tensor of one sample -> the whole batch's
        self._left: dict[Path, Tensor] = {}  # what the last call has left in objects
        self._kept: Objects | None = None
        self._paths: list[Path] | None = None

    def _held_with_samples(self) -> Iterator[tuple[Tensor, Layout]]:
        """Yields tensors in objects that have a row for each sample, and where it is."""
        known = {id(x) for x in self._whole}
        for path, x in self._objects.tensors.items():
            if id(x) in known:
                continue
            if x in WITH_SAMPLES:
                layout = WITH_SAMPLES[x]
            elif path in self._effects.inputs:
                layout = self.handle.of_units(self._effects.inputs[path])
            else:
                continue
            if has_rows(x, layout, self.handle, self.batch_size):
                known.add(id(x))
                yield x, layout

    @contextmanager
    def objects_put_back_if_it_fails(self) -> Iterator[None]:
        """Puts back what calls have left in objects, if the body raises."""
        try:
            yield
        except BaseException:
            if self._objects is not None:
                self._objects.put_back()
            raise

    def __call__(
        self, parameters: dict[str, Tensor], *rows: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the outputs of one sample, and the tensors that it leaves in objects."""
        handle = self.handle
        shown = [
            row.unsqueeze(layout.dim) if layout.kind == "dimension" else row
            for row, layout in zip(rows, self.layouts, strict=True)
        ]
        args, kwargs = self._arguments(shown)
        prefixed = {f"module.{name}": value for name, value in parameters.items()}
        found = functional_call(
            self._body, prefixed, args, kwargs, tie_weights=not handle.children_apart
        )
        outputs, self._shape = tree_flatten(found)
        self._outputs = [None if isinstance(y, Tensor) else y for y in outputs]
        self._where = [n for n, y in enumerate(outputs) if isinstance(y, Tensor)]
        if len(self._where) != len(self.out_layouts):
            raise ValueError(
                f"{handle.name or 'the network'} ({type(self.module).__name__}) returns "
                f"{len(self._where)} tensors, and {len(self.out_layouts)} when its samples were "
                "looked for: let it return the same for every batch, or call "
                "model.reset_batch_layouts() before one that differs"
            )
        pairs = zip(self._where, self.out_layouts, strict=True)
        rows = tuple(_one_row(outputs[n], layout, handle) for n, layout in pairs)
        return rows, self._rows_left(args, kwargs)

    def _arguments(self, shown: list[Tensor]) -> tuple[tuple, dict]:
        """Returns arguments of one sample; objects hold its tensors, too, where there are effects.

        These must be the caller's own, since they may be written to.
        """
        if self._objects is None:
            leaves = list(self._leaves)
            for n, x in zip(self._places, shown, strict=True):
                leaves[n] = x
            return tree_unflatten(leaves, self._structure)
        self._objects.put_back()
        self._shown = {id(x): whole for x, whole in zip(shown, self._whole, strict=True)}
        tensors = {id(whole): x for x, whole in zip(shown, self._whole, strict=True)}
        self._objects.show(tensors)
        return exchanged(self._args, tensors), self._kwargs

    def _rows_left(self, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        if self._objects is None:
            return ()
        self._kept = Objects(self.module, args, kwargs)
        left, known = self._kept.left_since(self._objects), set(self._shown)
        self._left = {}
        for path, x in left.items():
            if id(x) not in known:
                known.add(id(x))
                if path not in self._effects.outputs:
                    raise LayoutUnknown(self.handle.name)
                self._left[path] = x
        return tuple(
            _one_row(x, self._layout_at(path), self.handle) for path, x in self._left.items()
        )

    def _layout_at(self, path: Path) -> Layout:
        return self.handle.of_units(self._effects.outputs[path])

    def check_alike(self) -> None:
        """Refuses a call that leaves other tensors than the one before it."""
        paths = list(self._left)
        if self._paths not in (None, paths):
            raise LayoutUnknown(self.handle.name)
        self._paths = paths

    def joined(self, outputs: tuple[Tensor, ...], left: tuple[Tensor, ...]) -> Any:
        """Returns the outputs of the whole batch, and gives objects its tensors."""
        handle = self.handle
        for n, y, layout in zip(self._where, outputs, self.out_layouts, strict=True):
            self._outputs[n] = _join(y, layout, handle.examples_per_unit)
        if self._kept is not None:
            whole = dict(self._shown)
            for (path, x), rows in zip(self._left.items(), left, strict=True):
                layout = self._layout_at(path)
                if layout.kind == "shared" and not rows.requires_grad:
                    whole[id(x)] = rows[0]  # all samples have the same
                elif layout.kind == "shared":
                    whole[id(x)] = rows = _join(rows, layout, examples_per_unit=1)
                    WITH_SAMPLES[rows] = Layout() if layout.dim else ALONE
                else:
                    rows = rows.movedim(0, layout.sample_dim())
                    whole[id(x)] = _join(rows, layout, handle.examples_per_unit)
            self._kept.show(whole)
        return tree_unflatten(self._outputs, self._shape)


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
