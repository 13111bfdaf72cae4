"""Gives runs that are compared the same random numbers."""

import copy
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor


class RandomStates:
    """The states of all random generators, to be compared and restored.

    These are PyTorch's of the CPU and of a device, Python's, NumPy's if it is imported, and
    generators among the attributes of some objects.

    Args:
        owners: modules, or other objects with attributes.
        device: whose generator is saved too, if it is a GPU.
    """

    def __init__(self, owners: Iterable[Any] = (), device: torch.device | None = None):
        self._generators = list(_generators(owners, device))
        self._states = [get() for get, _ in self._generators]

    def restore(self) -> None:
        """Gives all generators their states."""
        for (_, give), state in zip(self._generators, self._states, strict=True):
            give(state)

    @property
    def have_moved(self) -> bool:
        """Returns whether a number was drawn since. The host waits for no GPU."""
        now = [get() for get, _ in self._generators]
        pairs = zip(self._states, now, strict=True)
        return any(_comparable(before) != _comparable(after) for before, after in pairs)


@contextmanager
def same_randomness(
    owners: Iterable[Any] = (), device: torch.device | None = None
) -> Iterator[RandomStates]:
    """Restores all generators at the end: see `RandomStates`, which it yields."""
    states = RandomStates(owners, device)
    try:
        yield states
    finally:
        states.restore()


def _generators(
    owners: Iterable[Any], device: torch.device | None
) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yields, of each generator, what gets its state and what sets it."""
    yield torch.get_rng_state, torch.set_rng_state
    if device is not None and device.type == "cuda":
        yield partial(torch.cuda.get_rng_state, device), _setting(device)
    yield random.getstate, random.setstate
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    kinds: set[type] = {torch.Generator, random.Random}
    if numpy is not None:
        yield numpy.get_state, numpy.set_state
        kinds |= {numpy.RandomState, numpy.Generator}
    values = chain.from_iterable([vars(owner).values() for owner in owners])
    for value in [value for value in values if type(value) in kinds]:
        if isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif hasattr(value, "bit_generator"):
            bits = value.bit_generator
            yield partial(_state_of, bits), partial(setattr, bits, "state")
        else:
            yield value.get_state, value.set_state


def _setting(device: torch.device) -> Callable[[Tensor], None]:
    return lambda state: torch.cuda.set_rng_state(state, device)


def _state_of(bits: Any) -> Any:
    return copy.deepcopy(bits.state)


def _comparable(state: Any) -> Any:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


def seed_all(seed: int) -> None:
    """Seeds PyTorch's, Python's and, if it is imported, NumPy's generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
