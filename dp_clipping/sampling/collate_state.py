"""Saves and restores what calls of a user's collate function change."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, np.generic)
"""Types of plain values."""


class CollateState:
    """Saves what calls of a collate function may change, and sets it back.

    Saved are the global random states of Python, NumPy and torch's CPU; generators and plain values
    among the attributes of the function's object and in its closure; generators among the arguments
    of a partial, and among the globals that the function names.
    """

    def __init__(self, collate_fn: Callable[[list], Any]) -> None:
        self._global = _global_state()
        self._restored: list[Callable[[], object]] = []
        while isinstance(collate_fn, partial):
            for value in (*collate_fn.args, *collate_fn.keywords.values()):
                self._note(value)
            collate_fn = collate_fn.func
        attributes = getattr(getattr(collate_fn, "__self__", collate_fn), "__dict__", None)
        attributes = attributes if isinstance(attributes, dict) else {}  # a class has no such one
        for name, value in list(attributes.items()):
            self._note(value, partial(attributes.__setitem__, name, value))
        function = getattr(collate_fn, "__func__", collate_fn)
        if not isinstance(function, FunctionType):
            function = type(collate_fn).__call__
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # an empty one
                value = cell.cell_contents
                self._note(value, partial(setattr, cell, "cell_contents", value))
        code = getattr(function, "__code__", None)
        for name in code.co_names if code else ():
            self._note(function.__globals__.get(name))

    def _note(self, value: Any, put_back: Callable[[], object] | None = None) -> None:
        if isinstance(value, torch.Generator):
            self._restored.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._restored.append(partial(setattr, bits, "state", copy.deepcopy(bits.state)))
        elif isinstance(value, np.random.RandomState):
            self._restored.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._restored.append(partial(value.setstate, value.getstate()))
        elif put_back is not None and isinstance(value, PLAIN):
            self._restored.append(put_back)

    def restore(self) -> None:
        """Sets everything back."""
        _set_global_state(self._global)
        for put_back in self._restored:
            put_back()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Lets calls begin with other global random numbers."""
        before = self._global
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        self._global = _global_state()
        try:
            yield
        finally:
            self._global = before

    def drawn(self) -> tuple[Any, ...]:
        """Returns the global random states now: equal where as many numbers were drawn."""
        python, numpy, cpu = _global_state()
        return python, pickle.dumps(numpy), cpu.numpy().tobytes()

    @property
    def has_drawn(self) -> bool:
        """Returns whether global random numbers were drawn since `restore`, which it calls."""
        now = self.drawn()
        self.restore()
        return now != self.drawn()


def _global_state() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_global_state(state: tuple[Any, Any, Tensor]) -> None:
    python, numpy, cpu = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
