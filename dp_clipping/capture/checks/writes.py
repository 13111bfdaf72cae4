"""Keeps values of tensors from before they are written to, to be compared and put back."""

from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.checks.places import Named, has_memory
from dp_clipping.torch_compat import TorchDispatchMode, schema_of, versions_of


class Writes(TorchDispatchMode):
    """Copies each of these tensors before the first operator that writes to its memory."""

    def __init__(self, tensors: list[Named]):
        super().__init__()
        self.copies: dict[int, tuple[Named, Tensor, Tensor]] = {}
        self._places: dict[int, list[tuple[Named, Tensor]]] = {}
        for named in tensors:
            alias = named.tensor.detach()
            if place := alias.untyped_storage().data_ptr():
                self._places.setdefault(place, []).append((named, alias))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, name in _written(function):
            value = args[place] if place < len(args) else kwargs.get(name)
            for x in value if isinstance(value, list | tuple) else (value,):
                if isinstance(x, Tensor) and has_memory(x):
                    self._keep(x)
        return function(*args, **kwargs)

    def _keep(self, x: Tensor) -> None:
        for named, alias in self._places.pop(x.untyped_storage().data_ptr(), ()):
            self.copies[id(named)] = (named, alias, alias.clone())

    def put_back(self) -> list[Named]:
        """Restores the memory and values of tensors; returns those that had changed."""
        changed = []
        with torch.no_grad():
            for named, alias, value in self.copies.values():
                if not equal(alias, value):
                    changed.append(named)
                    alias.copy_(value)
            for group in [*self._places.values(), [(n, a) for n, a, _ in self.copies.values()]]:
                for named, alias in group:
                    now = named.tensor
                    if now.data_ptr() != alias.data_ptr() or now.shape != alias.shape:
                        changed.append(named)  # x.data = another
                        now.data = alias
        return changed


class Values:
    """Values of tensors: copies, and of parameters, which are large, checksums of their bits.

    It finds writes that raise no version counter, as those through `.data`, with one wait of the
    host, and without a look at every operator. Parameters keep what was written.
    """

    def __init__(self, tensors: list[Named]):
        held = [(named, named.tensor.detach()) for named in tensors]
        self._held = sorted(held, key=lambda pair: str(pair[1].device))
        self._versions = versions_of(named.tensor for named, _ in self._held)
        self._kept = [
            _sum_of_bits(alias) if isinstance(named.tensor, nn.Parameter) else alias.clone()
            for named, alias in self._held
        ]

    @torch.no_grad()
    def put_back(self) -> list[Named]:
        """Gives tensors their memory and, unless they are parameters, values; those with others."""
        found: list[Named] = []
        for named, alias in self._held:
            now = named.tensor
            if now.data_ptr() != alias.data_ptr() or now.shape != alias.shape:
                found.append(named)  # x.data = another
                now.data = alias
        versions = versions_of(named.tensor for named, _ in self._held)
        kept = zip(self._held, self._kept, self._have_changed(), self._versions, versions,
                   strict=True)  # fmt: skip
        for (named, alias), value, has_changed, before, after in kept:
            is_parameter = isinstance(named.tensor, nn.Parameter)
            if has_changed or (is_parameter and after != before):
                found.append(named)
                if not is_parameter:
                    alias.copy_(value)
        return found

    def _have_changed(self) -> list[bool]:
        flags: list[bool] = []
        pairs = zip(self._held, self._kept, strict=True)
        for _, group in groupby(pairs, lambda pair: pair[0][1].device):
            differ = [
                value != _sum_of_bits(alias)
                if isinstance(named.tensor, nn.Parameter)
                else (_bits(value) != _bits(alias)).any()
                for (named, alias), value in group
            ]
            flags += torch.stack(differ).tolist()
        return flags


def _sum_of_bits(x: Tensor) -> Tensor:
    return _bits(x).sum(dtype=torch.int64)


def _bits(x: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(whole[x.element_size()])


@lru_cache(maxsize=4096)
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """Returns place and name of the arguments that an operator writes to."""
    schema = schema_of(function)
    if schema is None:
        return ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def equal(now: Tensor, value: Tensor) -> bool:
    """Returns whether two tensors are equal, NaN to NaN; the host waits."""
    if now.shape != value.shape or now.dtype != value.dtype:
        return False
    return bool(((now == value) | ((now != now) & (value != value))).all())
