"""Proves which rows of an embedding's gradient can differ from zero.

The gradient of `nn.Embedding` is a dense tensor in which only the rows of looked-up tokens are not
zero. The tensor does not say so, and the weight may be used elsewhere too (tied to an output head,
in a penalty), or a hook may change the gradient. `Lookups` follows the tensor instead:

    forward      the embedding looks up some ids
    backward     the look-up's node returns a gradient, a tensor
    arrival      this very tensor, unchanged, arrives at the parameter: it is the only contribution
    accumulated  `.grad` holds its memory, or is what it was before plus that tensor

A tensor's version counts the writes to it, so no value is read. Where a link is missing there is no
proof, and the gradient is exchanged whole. Writing through `.data` is not counted.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

from ddp.torch_compat import keeps_graph, version_of

TensorsOrNone = tuple[Tensor | None, ...]


class State:
    """A tensor as it is now, which it holds weakly: memory may be freed and used again."""

    def __init__(self, x: Tensor):
        self._tensor, self.version = weakref.ref(x), version_of(x)

    def is_of(self, x: Tensor, writes: int = 0) -> bool:
        """Returns whether `x` is that tensor, after so many writes."""
        return self._tensor() is x and version_of(x) == self.version + writes


class Lookup:
    """The ids of one forward; the hook of its autograd node owns it, so it lives as long."""

    def __init__(self, ids: Tensor):
        self.ids: Tensor | None = ids
        self.promise: object = None  # that included its rows


class Lookups:
    """The look-ups of one embedding's weight, and what they prove about its `.grad`."""

    def __init__(self, weight: Parameter):
        self.weight = weight
        self._pending: list[weakref.ref[Lookup]] = []  # their backward has not run
        self._ran: list[tuple[State, Lookup]] = []  # it has, and nothing was accumulated yet
        self._arriving: tuple[Callable[[Tensor], bool], Lookup] | None = None
        self._proven: State | None = None  # of `.grad`, while its rows are known
        self._mask: Tensor | None = None  # rows of `.grad` that no promise has included
        self._promise: object = None
        self._is_kept = True
        self._node = get_gradient_edge(weight).node  # the parameter holds it weakly
        arrive = weakref.WeakMethod(self._arrive)
        self._handle = self._node.register_prehook(lambda g: _call(arrive, g))

    def close(self) -> None:
        self._handle.remove()

    def observe(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Notes a look-up; a forward hook of the embedding."""
        if torch.compiler.is_compiling() or not isinstance(output, Tensor):
            return
        node = output.grad_fn
        if node is None or not self._is_own(node):
            return
        lookup = Lookup(args[0] if args else kwargs["input"])
        self._pending = [ref for ref in self._pending if ref() is not None]
        self._pending.append(weakref.ref(lookup))
        ran = weakref.WeakMethod(self._run)
        node.register_hook(lambda gradients, _: _call(ran, gradients, lookup))

    def promise(self) -> Tensor | None:
        """Returns a mask [V] of the rows that the gradient may have after this backward.

        None: there is no telling. That takes exactly one look-up, of this backward.
        """
        gradient = self.weight.grad
        self._mask = None if gradient is None else self._mask
        lookups = {id(lookup): lookup for _, lookup in self._ran}
        alive = [lookup for ref in self._pending if (lookup := ref()) is not None]
        self._pending = [weakref.ref(lookup) for lookup in alive]
        lookups |= {id(lookup): lookup for lookup in alive}
        if len(lookups) > 1 or not (lookups if gradient is None else self._knows(gradient)):
            return None
        self._promise, self._is_kept = object(), True
        mask = self.mask(fill=0) if self._mask is None else self._mask.clone()
        for lookup in lookups.values():
            _mark(mask, lookup)
            lookup.promise = self._promise
        return mask

    def accumulated(self) -> None:
        """Autograd, and the hooks of users, are done with `.grad` for this backward."""
        arriving, self._arriving, self._proven = self._arriving, None, None
        gradient = self.weight.grad
        if arriving is None or gradient is None or not arriving[0](gradient):
            return
        self._proven, lookup = State(gradient), arriving[1]
        if self._promise is None or lookup.promise is not self._promise:
            self._is_kept = False
            self._mask = self.mask(fill=0) if self._mask is None else self._mask
            _mark(self._mask, lookup)

    def settle(self) -> bool:
        """Returns whether `.grad` has the promised rows at most; from now on it holds others."""
        gradient = self.weight.grad
        is_proven = gradient is None or (self._is_kept and self._knows(gradient))
        self._proven = self._mask = self._promise = None
        return is_proven

    def mask(self, fill: int) -> Tensor:
        """Returns a mask [V] in which no row is marked (0) or each (1)."""
        size, device = len(self.weight), self.weight.device
        return torch.full((size,), fill, dtype=torch.uint8, device=device)

    # ---- hooks of autograd ---------------------------------------------------------------------

    def _run(self, gradients: TensorsOrNone, lookup: Lookup) -> None:
        """The look-up's node has run."""
        if gradients[0] is not None:
            self._ran.append((State(gradients[0]), lookup))
        if not keeps_graph():  # it cannot run again, though a loss may keep it alive
            self._pending = [ref for ref in self._pending if ref() is not lookup]

    def _arrive(self, gradients: TensorsOrNone) -> None:
        """The sum of all contributions arrives at the parameter."""
        ran, self._ran, self._arriving = self._ran, [], None
        arrived, gradient = gradients[0], self.weight.grad
        if arrived is None or len(ran) != 1 or not ran[0][0].is_of(arrived):
            return
        if gradient is None:
            self._mask, self._is_kept = None, True
            self._arriving = partial(_took_over, _memory(arrived), version_of(arrived)), ran[0][1]
        elif self._knows(gradient):
            self._arriving = partial(self._proven.is_of, writes=1), ran[0][1]

    def _knows(self, gradient: Tensor) -> bool:
        return self._proven is not None and self._proven.is_of(gradient)

    def _is_own(self, node: Node) -> bool:
        leaf = node.next_functions[0][0] if node.next_functions else None
        return node.name() == "EmbeddingBackward0" and leaf is self._node


def _call(method: weakref.WeakMethod, *arguments: Any) -> None:
    if (alive := method()) is not None:
        alive(*arguments)


def _memory(x: Tensor) -> tuple[Any, int]:
    """Returns the memory of a tensor, which is not used again while this is kept."""
    return x.untyped_storage(), x.data_ptr()


def _took_over(memory: tuple[Any, int], version: int, x: Tensor) -> bool:
    """Returns whether `x` has this memory and nothing was written to it since."""
    return x.data_ptr() == memory[1] and version_of(x) == version


def _mark(mask: Tensor, lookup: Lookup) -> None:
    mask.index_fill_(0, lookup.ids.detach().reshape(-1).long(), 1)
