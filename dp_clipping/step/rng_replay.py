"""Replays torch's random numbers: a second backward draws the numbers of the first one.

A checkpointed block with `preserve_rng_state=False` drops out other units each time it is
recomputed. Norms and sums would then be of different gradients. The same state gives the same
numbers if every layer that draws runs again, in the same order. So the second backward may leave
layers out only if the first one drew nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Randomness:
    """The states of torch's generators of the CPU and of a tensor's device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._cpu = tensor, torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)

    @property
    def has_moved(self) -> bool:
        """Returns whether a number has been drawn since.

        The state of a GPU's generator, a seed and an offset, is on the host: reading it does not
        synchronise.
        """
        _, states = get_device_states(self._tensor)
        pairs = zip([self._cpu, *self._states], [torch.get_rng_state(), *states], strict=True)
        return not all(torch.equal(then, now) for then, now in pairs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Replays the saved generator states; afterwards generators continue as before."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states)
            yield
