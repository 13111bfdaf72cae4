"""What a criterion keeps from call to call, as far as it can be seen: to put it back."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)


class State:
    """Attributes, buffers and closures of a callable, and of what it calls by `partial`."""

    def __init__(self, criterion: Any):
        self._holders = list(_holders(criterion))

    @contextmanager
    def kept(self) -> Iterator[Callable[[], bool]]:
        """Afterwards all of it is as before. Yields what tells whether it has changed inside."""
        records = [record for holder in self._holders for record in _records(holder)]
        try:
            yield lambda: any(record.has_changed() for record in records)
        finally:
            for record in reversed(records):
                if record.has_changed():
                    record.put_back()


def _holders(found: Any) -> Iterator[dict | CellType]:
    """Dictionaries of attributes, and the cells of closures."""
    if isinstance(found, partial):
        yield from _holders(found.func)
        for value in (*found.args, *found.keywords.values()):
            yield from _holders(value)
    elif isinstance(found, MethodType):
        yield from _holders(found.__self__)
    elif isinstance(found, FunctionType):
        yield found.__dict__
        yield from found.__closure__ or ()
    elif isinstance(found, nn.Module):
        for module in found.modules():
            yield vars(module)
    elif not isinstance(found, Tensor | type) and hasattr(found, "__dict__"):
        yield vars(found)
        for value in vars(found).values():
            if isinstance(value, nn.Module):
                yield from _holders(value)


class Attributes:
    """A dictionary of attributes: what its keys stand for."""

    def __init__(self, attributes: dict):
        self._attributes, self._before = attributes, dict(attributes)

    def has_changed(self) -> bool:
        now, before = self._attributes, self._before
        return now.keys() != before.keys() or any(now[k] is not before[k] for k in before)

    def put_back(self) -> None:
        self._attributes.clear()
        self._attributes.update(self._before)


class Cell:
    """What a variable of an enclosing function stands for."""

    def __init__(self, cell: CellType):
        self._cell, self._before = cell, cell.cell_contents

    def has_changed(self) -> bool:
        return self._cell.cell_contents is not self._before

    def put_back(self) -> None:
        self._cell.cell_contents = self._before


class Values:
    """A tensor's. They are written only if they have changed: a backward may need them as saved."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._version = tensor, tensor._version
        self._before = tensor.detach().clone()

    def has_changed(self) -> bool:
        return self._tensor._version != self._version

    def put_back(self) -> None:
        with torch.no_grad():
            if self._tensor.shape == self._before.shape:
                self._tensor.copy_(self._before)


class Content:
    """What a list, dictionary, set or queue contains."""

    def __init__(self, container: Any):
        self._container, self._before = container, copy.copy(container)

    def _identities(self, container: Any) -> list[int]:
        values = [*container, *container.values()] if isinstance(container, dict) else container
        return [id(x) for x in values]

    def has_changed(self) -> bool:
        return self._identities(self._container) != self._identities(self._before)

    def put_back(self) -> None:
        self._container.clear()
        keyed = isinstance(self._container, dict | set)
        (self._container.update if keyed else self._container.extend)(self._before)


def _records(holder: dict | CellType) -> Iterator[Any]:
    if isinstance(holder, CellType):
        try:
            values = [holder.cell_contents]
        except ValueError:  # empty
            return
        yield Cell(holder)
    else:
        values = list(holder.values())
        yield Attributes(holder)
    for value in values:
        yield from _contents(value)


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield Values(value)
    elif isinstance(value, CONTAINERS):
        yield Content(value)
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _contents(inner)
