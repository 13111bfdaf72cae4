"""Refuses arguments in which an earlier forward has left something that this one reads.

A list or a cache that a loop hands to each forward carries data from batch to batch, as state of
the network does: see `carried`.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.samples.batch import tensors_of
from dp_clipping.torch_compat import tensors_in
from dp_clipping.trials.objects import Objects, exchanged

REFUSAL = (
    "an argument holds what an earlier forward has left in it, and this forward reads it: "
    "gradients then depend on samples of earlier steps; give each forward a new object, as "
    "model(x, memory=[]) or model(x, past_key_values=DynamicCache())"
)


class LeftInArguments:
    """Tensors that forwards have left in objects of their arguments.

    Args:
        run: a context in which the plain network has run with args and kwargs; yields its outputs.
            None: other ranks do not run with this one, so nothing is looked for.

    Attributes:
        noted: what earlier forwards have left.
    """

    def __init__(self, run: Callable[[tuple, dict], AbstractContextManager] | None):
        self._run: Any = run
        self.noted: list[weakref.ref[Tensor]] = []

    def note(self, args: tuple, kwargs: dict, before: Objects) -> None:
        """Notes what a forward has left, for `without`."""
        left = Objects(args, kwargs).left_since(before)
        kept = [x for x in self.noted if x() is not None]
        self.noted = kept + [weakref.ref(x) for x in left]

    @contextmanager
    def without(self, args: tuple, kwargs: dict) -> Iterator[tuple]:
        """Yields arguments without what earlier forwards have left in them, and puts that back.

        A number is in its place: it has rows of another batch.

        Raises:
            ValueError: this forward reads it. That is tried with other values.
        """
        noted = {id(x()) for x in self.noted} - {id(None)}
        objects = Objects(args, kwargs) if noted and self._run is not None else None
        left = [] if objects is None else [x for x in objects.tensors if id(x) in noted]
        if objects is None or not left:
            yield args
            return
        self._refuse_read(objects, left, args, kwargs)
        aside = {id(x): torch.zeros((), device=x.device) for x in left}
        objects.show(aside)
        try:
            yield exchanged(args, aside)
        finally:
            Objects(args, kwargs).show({id(aside[id(x)]): x for x in left})

    def _refuse_read(self, objects: Objects, left: list[Tensor], args: tuple, kwargs: dict) -> None:
        others = {id(x): _with_others(x) for x in left}
        try:
            found = self._values(args, kwargs)
        except Exception as error:  # it does not fit this batch
            if any(x.dim() and not len(x) for x in tensors_in((args, kwargs))):
                return
            raise ValueError(REFUSAL) from error
        objects.show(others)
        try:
            changed = self._values(exchanged(args, others), kwargs)
        except Exception as error:  # other values do not fit: they are read
            raise ValueError(REFUSAL) from error
        finally:
            objects.put_back()
        if not all(map(torch.equal, found, changed)):
            raise ValueError(REFUSAL)

    def _values(self, args: tuple, kwargs: dict) -> list[Tensor]:
        with self._run(args, kwargs) as outputs:
            return [y.detach().nan_to_num() for y in tensors_of(outputs)]


def _with_others(x: Tensor) -> Tensor:
    """Returns a tensor of other values."""
    x = x.detach()
    return x + 1 if x.is_floating_point() else (x == 0).to(x.dtype)
