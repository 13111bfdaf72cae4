"""Parameters as views of their unit's flat buffer, and what code writes to them.

`fsdp` looks for writes before it frees the memory of whole values: a rank's slice follows, and
parameters are stand-ins from then on (stand_in.py).
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp.sharded.internals.stand_in import hide_all, reveal_all
from ddp.sharded.layout import FlatUnit
from ddp.sharded.slices import pieces_of
from ddp.torch_compat import all_gather, version_of

MOVED = (
    "{name} has got other memory than that of its slices, as by `p.data = value`, model.to() or "
    "another wrapper of the network: write `p.data.copy_(value)`, or wrap the network again and "
    "make another optimizer"
)


def refuse_moved(unit: FlatUnit, names: Sequence[str]) -> None:
    """Raises RuntimeError if a parameter of a unit is no view of its values any more."""
    for p, view, name in zip(unit.parameters, unit.value_views, names, strict=True):
        is_there = p.data_ptr() == view.data_ptr() and p.dtype == view.dtype
        if not is_there or p.shape != view.shape or p.stride() != view.stride():
            raise RuntimeError(MOVED.format(name=name))


def make_stand_ins(unit: Any) -> None:
    """Makes the parameters of a `GatheredUnit` stand-ins, now and once it has gone."""
    for parameter in (p for p in unit.parameters if p.dtype != unit.values.dtype):
        parameter.grad = None
    stand_ins = unit.parameters, unit.names, unit.values.dtype
    hide_all(*stand_ins)
    weakref.finalize(unit, hide_all, *stand_ins).atexit = False


def show(unit: Any) -> None:
    """Makes the parameters views of the values."""
    reveal_all(unit.parameters, unit.value_views)
    unit.versions = list(map(version_of, unit.parameters))


def hide(unit: Any) -> None:
    """Makes the parameters stand-ins, and this rank's slice what was written to them.

    Nothing counts what a forward writes through `.data`: behind it the values are compared.
    """
    refuse_moved(unit, unit.names)
    if unit.was_called or unit.versions != list(map(version_of, unit.parameters)):
        from ddp.internals.kernels import take_written  # imports Triton

        take_written(unit.own(unit.values), unit.shard)
    unit.was_called = False
    hide_all(unit.parameters, unit.names, unit.values.dtype)


def gather(unit: FlatUnit, own: Tensor) -> list[Tensor]:
    """Returns whole tensors in the parameters' shapes from every rank's slice; a collective."""
    flat = own.new_empty(unit.numel)
    all_gather(flat, own.contiguous(), unit.group).wait()
    return unit.views(flat)


@torch.no_grad()
def keep(unit: FlatUnit, whole: Mapping[Parameter, Tensor]) -> None:
    """Makes whole tensors the values of the parameters: this rank keeps what it owns."""
    for piece in pieces_of(unit):
        unit.shard[piece.of_own] = whole[piece.parameter].reshape(-1)[piece.of_whole]
