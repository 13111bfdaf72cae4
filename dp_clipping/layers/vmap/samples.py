"""Runs a module for each sample with a copy of the parameters: under `torch.vmap`, or in turn."""

from contextvars import ContextVar
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dp_clipping.distributed.dtensor import fsdp_classes
from dp_clipping.layers.batch_layout import LayoutUnknown, NeedsVmap, rows_unknown
from dp_clipping.layers.handle import LayerState, plain_forward
from dp_clipping.layers.tensor_parallel import refuse_distributed, settled
from dp_clipping.layers.vmap.own import refuse_other_number, replaced, rows_of_table, taken_for
from dp_clipping.layers.vmap.refusals import leaves_samples, reason_of, refusal_of
from dp_clipping.torch_compat import (
    PLAIN_LEAVES,
    is_passed_on,
    never_compiled,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from dp_clipping.trials.holders import held_by
from dp_clipping.trials.objects import Objects

rows_of_call: ContextVar[int] = ContextVar("rows_of_call", default=0)
"""The rows that the code of a module has while it runs for one sample; 0: it has the batch's."""


def every_sample(
    self: nn.Module, copies: dict[str, Tensor], batch_size: int, args: tuple, kwargs: dict,
    is_compiled: bool | None = None,
) -> Any:  # fmt: skip
    """Returns a module's output for each sample with its own copy of the parameters, joined.

    Where `torch.vmap` cannot run the module, its samples run one after another.

    Args:
        copies: [B, *parameter] of each that the module captures.
        args, kwargs: of the whole batch.
        is_compiled: code is traced in steps, and copies have no attributes; None: as now.
    """
    handle: LayerState = self._private
    is_traced = torch.compiler.is_compiling()
    is_compiled = is_traced if is_compiled is None else is_compiled
    call = _OneSample(self, batch_size, args, kwargs, has_attributes=not is_compiled)
    # A trial is the first run, and may fail half-way.
    before = Objects(self, args, kwargs) if handle.private_step is None else None
    if handle.one_by_one:
        return call.joined(_in_a_loop(call, copies))
    try:
        if is_traced:
            outputs = call.in_vmap(copies)
        else:
            # PyTorch does not notice under vmap that a mask (a relative position bias) needs a
            # gradient, and chooses a kernel without.
            with sdpa_kernel(SDPBackend.MATH), _Padding():
                outputs = call.in_vmap(copies)
        if before is not None:  # not in other objects: nobody reads a cache in training
            given = filter(held_by, tree_leaves((args, kwargs)))
            if Objects(*given).left_since(before):
                raise call.left_in("an object among its arguments")
        return outputs
    except (LayoutUnknown, ValueError):
        raise
    except Exception as error:
        if is_passed_on(error):
            raise
        if not may_loop(self):
            refusal = refusal_of(error, handle.name, self)
            if refusal is None:
                raise
            raise refusal from error
        if before is not None:
            before.put_back()
        outputs = call.joined(_in_a_loop(call, copies))
        handle.one_by_one = reason_of(error)
        return outputs


class _Padding(TorchFunctionMode):
    """A context in which the padding of an embedding has no gradient under vmap."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        function = rows_of_table if function is F.embedding else function
        return function(*args, **(kwargs or {}))


def may_loop(module: nn.Module) -> bool:
    """Returns whether a module may run once for each sample.

    Not in code that is being traced, nor where a child gathers its parameters, which other ranks
    do as often as they have samples.
    """
    if torch.compiler.is_compiling():
        return False
    return not any(isinstance(m, fsdp_classes()) for m in module.modules() if m is not module)


@never_compiled
def _in_a_loop(call: "_OneSample", copies: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns what `torch.vmap` would, from one call for each sample.

    Raises:
        NeedsVmap: a sample leaves something in an object, where there is room for one.
    """
    parameters = {name: copy.unbind(0) for name, copy in copies.items()}
    pairs = zip(call.rows, call.layouts, strict=True)
    inputs = [(x, layout.kind == "shared") for x, layout in pairs]
    objects = Objects(*call.roots)
    found, given, left = [], [], []
    for n in range(call.batch_size):
        objects.put_back()
        own = {name: values[n] for name, values in parameters.items()}
        # Copies: a write to a view of one sample would count as one to those of the others.
        rows = [x if is_shared else x[n].clone() for x, is_shared in inputs]
        given.append(rows)
        found.append(call(own, *rows))
        if call.handle.private_step is None:
            mine = {id(p) for p in own.values()}  # code may list them: see below
            others = Objects(*call.roots).left_since(objects)
            left.append([x for x in others if id(x) not in mine])
    # Where code has listed the parameters that it was called with last, these are its own again.
    Objects(*call.roots).show({id(own[name]): p for name, p in call.own.items()})
    if leaves_samples(left):
        raise call.left_in("an object")
    for (x, is_shared), rows in zip(inputs, zip(*given, strict=True), strict=True):
        if not is_shared and any(map(version_of, rows)):
            x.copy_(torch.stack(rows))
    call.refuse_other_number(found)
    try:
        return tuple(map(torch.stack, zip(*found, strict=True)))
    except RuntimeError as error:
        raise rows_unknown(call.handle.name) from error


class _OneSample:
    """Calls a module with one sample: under `torch.vmap`, or for each sample in turn.

    Attributes:
        own: the parameters that it captures, by their names.
        has_attributes: copies have the class and the attributes of their parameters.
        rows: the inputs, those that have samples as [B, ..].
        layouts, out_layouts: where samples are in inputs and outputs.
        roots: of the objects that a call may write to.
    """

    def __init__(
        self, module: nn.Module, batch_size: int, args: tuple, kwargs: dict, has_attributes: bool
    ):
        self.module, self.batch_size = module, batch_size
        self.handle: LayerState = module._private
        self.roots, self._has_attributes = (module, args, kwargs), has_attributes
        self.own = self.handle.own(module)
        every = dict(module.named_parameters(remove_duplicate=False))
        self._paths = {name: name for name in self.own}  # where the code finds them
        for name in self.own:
            self._paths |= {path: name for path, p in every.items() if p is every.get(name)}
        given, self._structure = tree_flatten((args, kwargs))
        kinds = {*map(type, args), *map(type, kwargs.values())}
        self._has_containers = not kinds <= PLAIN_LEAVES
        self._leaves = [settled(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
        refuse_distributed(self.handle, *self._leaves, *module.parameters())
        self._places = [n for n, leaf in enumerate(given) if isinstance(leaf, Tensor)]
        tensors = [self._leaves[n] for n in self._places]
        self.layouts = self.handle.layouts_of(tensors, batch_size)
        self.out_layouts = self.handle.output_layouts_of(tensors)
        inputs = zip(tensors, self.layouts, strict=True)
        self.rows = [x if at.kind == "shared" else at.split(x, batch_size) for x, at in inputs]

    def __call__(self, parameters: dict[str, Tensor], *rows: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs of one sample."""
        leaves = list(self._leaves)
        for n, row in zip(self._places, rows, strict=True):
            leaves[n] = row
        args, kwargs = tree_unflatten(leaves, self._structure)
        if self._has_attributes:
            for name, parameter in self.own.items():  # in place: the caller looks for them
                parameters[name] = taken_for(parameters[name], parameter)
        with replaced(self.module, {path: parameters[name] for path, name in self._paths.items()}):
            found = self._forward(args, kwargs)
        if self._has_containers:  # copies of the batch's, which nobody looks into afterwards
            now = tree_leaves((args, kwargs))
            if len(now) != len(leaves) or not all(map(is_, now, leaves)):
                raise self.left_in("a list or dict among its arguments")
        self._returned = found
        outputs, self._shape = tree_flatten(found)
        self._outputs = [None if isinstance(y, Tensor) else y for y in outputs]
        self._where = [n for n, y in enumerate(outputs) if isinstance(y, Tensor)]
        return tuple([outputs[n] for n in self._where])

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():
            return plain_forward(self.module, *args, **kwargs)
        outer = rows_of_call.set(self.handle.examples_per_unit)
        try:
            return plain_forward(self.module, *args, **kwargs)
        finally:
            rows_of_call.reset(outer)

    def left_in(self, what: str) -> NeedsVmap:
        """Returns the error of a call that leaves something where there is room for one sample."""
        return NeedsVmap(
            self.handle.name,
            f"{self.handle.title(self.module)} leaves what it computes of a sample in {what}, and "
            "runs sample by sample, so the batch's would not be there: return it from the module's "
            "forward, as return y, memory",
        )

    def in_vmap(self, copies: dict[str, Tensor]) -> Any:
        """Returns the outputs of the whole batch, by `torch.vmap`."""
        places = [None if layout.kind == "shared" else 0 for layout in self.layouts]
        run = torch.vmap(self, (0, *places), randomness="different")
        return self.joined(run(copies, *self.rows))

    def refuse_other_number(self, outputs: list[tuple[Tensor, ...]]) -> None:
        """Raises an error unless each sample, or the batch, has as many outputs as are known."""
        counts = set(map(len, outputs))
        refuse_other_number(self.module, counts, len(self.out_layouts), self._returned)

    def joined(self, outputs: tuple[Tensor, ...]) -> Any:
        """Returns the outputs of the whole batch."""
        k = self.handle.examples_per_unit
        self.refuse_other_number([outputs])
        for n, y, layout in zip(self._where, outputs, self.out_layouts, strict=True):
            if layout.kind == "shared":  # a batch: every sample has its own parameters
                y = y.squeeze(1) if layout.dim else y
                self._outputs[n] = y if k == 1 else y.repeat_interleave(k, 0)
                continue
            if layout.kind == "dimension" and y.shape[layout.dim + 1] != 1:
                raise rows_unknown(self.handle.name)
            self._outputs[n] = layout.joined(y)
        return tree_unflatten(self._outputs, self._shape)
