"""Gives runs the same random numbers: those that are compared, and a second backward.

A checkpointed block with `preserve_rng_state=False` drops out other units each time it is
recomputed. Norms and sums would then be of different gradients. The same state gives the same
numbers if every layer that draws runs again, in the same order. So a second backward may leave
layers out only if the first one drew nothing.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RandomStates:
    """The states of all random generators, to be compared and restored.

    These are PyTorch's of the CPU and of a device, Python's, NumPy's, and generators among the
    attributes of some objects.

    Args:
        owners: modules, or other objects with attributes.
        device: whose generator is saved too, if it is a GPU.
        only_torch: PyTorch's alone, which no other thread of the process draws from.
    """

    def __init__(
        self,
        owners: Iterable[Any] = (),
        device: torch.device | None = None,
        only_torch: bool = False,
    ):
        own = _torch_generators(device)
        self._generators = list(own if only_torch else chain(own, _generators(owners)))
        self._states = [get() for get, _ in self._generators]

    def restore(self) -> None:
        """Gives all generators their states."""
        for (_, give), state in zip(self._generators, self._states, strict=True):
            give(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Replays the states; afterwards generators continue as before."""
        now = [get() for get, _ in self._generators]
        self.restore()
        try:
            yield
        finally:
            for (_, give), state in zip(self._generators, now, strict=True):
                give(state)

    @property
    def have_moved(self) -> bool:
        """Returns whether a number was drawn since. The host waits for no GPU."""
        now = [get() for get, _ in self._generators]
        return not all(map(_are_equal, self._states, now))


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


Generator = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Two functions: one returns the state of a generator, the other sets it."""


def _torch_generators(device: torch.device | None) -> Iterator[Generator]:
    yield torch.get_rng_state, torch.set_rng_state
    if device is not None and device.type == "cuda":
        get, give = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        yield partial(get, device), partial(give, device=device)


def _generators(owners: Iterable[Any]) -> Iterator[Generator]:
    """Yields Python's, NumPy's, and those among the attributes of some objects."""
    yield random.getstate, random.setstate
    yield np.random.get_state, np.random.set_state
    kinds = {torch.Generator, random.Random, np.random.RandomState, np.random.Generator}
    values = chain.from_iterable([vars(owner).values() for owner in owners])
    for value in [value for value in values if type(value) in kinds]:
        if isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif hasattr(value, "bit_generator"):
            bits = value.bit_generator
            yield partial(_state_of, bits), partial(setattr, bits, "state")
        else:
            yield value.get_state, value.set_state


def _state_of(bits: Any) -> Any:
    return copy.deepcopy(bits.state)


def _are_equal(one: Any, other: Any) -> bool:
    """Returns whether two states are equal; NumPy's have arrays in them."""
    if isinstance(one, Tensor):
        one, other = one.numpy(), other.numpy()
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple) and any(isinstance(x, np.ndarray) for x in one):
        return all(map(_are_equal, one, other))
    return one == other


def seed_all(seed: int, only_cpu: bool = False) -> None:
    """Seeds PyTorch's, Python's and NumPy's generators.

    Args:
        only_cpu: leaves PyTorch's generators of other devices as they are.
    """
    (torch.default_generator if only_cpu else torch).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
