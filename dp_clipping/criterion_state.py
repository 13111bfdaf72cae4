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
    def kept(self) -> Iterator[None]:
        """Afterwards all of it is as before."""
        undo = [_restoring(holder) for holder in self._holders]
        try:
            yield
        finally:
            for put_back in reversed(undo):
                put_back()


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
            yield module._buffers
    elif not isinstance(found, Tensor | type) and hasattr(found, "__dict__"):
        yield vars(found)
        for value in vars(found).values():
            if isinstance(value, nn.Module):
                yield from _holders(value)


def _restoring(holder: dict | CellType) -> Callable[[], None]:
    if isinstance(holder, CellType):
        try:
            value = holder.cell_contents
        except ValueError:  # empty
            return lambda: None
        inner = _content(value)

        def put_back() -> None:
            holder.cell_contents = value
            inner()

        return put_back
    before = dict(holder)
    contents = [_content(value) for value in before.values()]

    def put_all_back() -> None:
        if isinstance(holder, dict):
            holder.clear()
            holder.update(before)
        for one in contents:
            one()

    return put_all_back


def _content(value: Any) -> Callable[[], None]:
    """What puts back the content of a value that may change in place."""
    if isinstance(value, nn.Parameter):
        return lambda: None
    if isinstance(value, Tensor):
        kept, version = value.detach().clone(), value._version

        def copy_back() -> None:  # a step's backward may need it as it is
            with torch.no_grad():
                if value._version != version and value.shape == kept.shape:
                    value.copy_(kept)

        return copy_back
    if isinstance(value, CONTAINERS):
        kept = copy.copy(value)
        inner = [_content(x) for x in (kept.values() if isinstance(kept, dict) else kept)]

        def fill() -> None:
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(kept)
            for one in inner:
                one()

        return fill
    return lambda: None
