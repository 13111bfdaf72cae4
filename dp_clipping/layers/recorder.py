"""Declares what passes between layers and private steps: parameters, and what a use leaves.

In forward a layer gets the trigger that makes autograd visit it, and notes products in `plans`. In
backward it gives `PrivateStep.take`, for each use of a parameter, G or what G follows from. Uses of
a parameter that has several are joined there (`sums.plain.Uses`). In a compiled region, and where a
module computes with copies of its parameters, slots take the place of both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

# What a use of a layer leaves in backward, and the value that it gives to `take` with tensors:
LINEAR = "linear"  # output gradients and inputs, from which G and norms follow; the site
NORMALIZED = "normalized"  # the same; (`Normalized`, (record or None of the weight, of the bias))
DENSE = "dense"  # G [B, *parameter] of each record; squared norms [B] of the only one, or None
FACTORS = "factors"  # an object that G follows from; see `sums.plain` and `sums.fused`

# What arrives at the slots of a layer in a compiled region: see `layers.linear`.
GRADIENT_SLOTS = ("gradient", "squares", "count")
FACTOR_SLOTS = ("y", "a", "count")
LOOK_UP_SLOTS = ("y", "ids", "count")
CHANGED = (
    "than in the plain forward that was made for network inputs of these shapes: a compiled layer "
    "must be known beforehand; if the network has changed call model.reset_batch_layouts(), if it "
    "depends on its inputs' values do not compile it"
)


@dataclass(eq=False, slots=True)
class Trainable:
    """A trainable parameter, as the private steps of one model know it.

    Steps look things up by these, hundreds of times each: a dictionary of parameters would call
    `Tensor.__hash__`, which is Python, at every look.

    Attributes:
        parameter: the parameter itself.
        number: its place in order of registration.
        name: its full name in the network.
        shape: the shape that its layer computes with: a part under tensor parallelism.
        group: the number of its clipping group.
        norm_key: norms of parameters with the same key may be taken together.
        sum_dtype: of its clipped sum.
        trigger: the leaf that makes autograd visit what uses it.
        joint: parameters, this one too, whose uses are joined; None: it has one use.
        is_reused: a step has used it several times, whatever the search for samples has seen.
    """

    parameter: Parameter
    number: int
    name: str
    shape: torch.Size
    group: int
    norm_key: Hashable
    sum_dtype: torch.dtype
    trigger: Tensor
    joint: Joint | None = None
    is_reused: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Joint:
    """Parameters of layers of which some have several uses.

    What these leave is joined when all of it has arrived, so that cross terms are in the norm.

    Attributes:
        records: the parameters; layers that share one of them have all of theirs in it.
        linear: those weights all of whose uses are products: their tokens are those of one use.
        factored: those of which all are products or look-ups, `linear` too.
    """

    records: tuple[Trainable, ...]
    linear: frozenset[Trainable]
    factored: frozenset[Trainable]


class Left(NamedTuple):
    """Holds what one use of a layer has left in backward.

    Attributes:
        kind: `LINEAR`, `NORMALIZED`, `DENSE` or `FACTORS`: what `value` and `tensors` are.
        records: the parameters whose G follow from it.
        tensors: what it is made of, of the `versions` that they had when it came.
    """

    kind: str
    records: tuple[Trainable, ...]
    value: Any
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]


Summand = tuple[Any, tuple[Tensor, ...], tuple[int, ...]]
"""G, or its factors, of one parameter; the tensors that it is made of, and their versions."""
Count = tuple[frozenset[Trainable], Tensor, int]
"""Weights; how often compiled code has used them in all [1]; and how many of them it has used."""
Accumulate = Callable[[Iterable[tuple[Trainable, Tensor | None]]], None]
"""Takes clipped sums; None is zeros."""
