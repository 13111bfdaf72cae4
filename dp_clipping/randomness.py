"""torch's random numbers: a backward that runs a second time draws what it drew the first time.

A checkpointed block with `preserve_rng_state=False` drops out other units in each of its
recomputations: the norms would be of other gradients than the sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Randomness:
    """Where torch's generators of the CPU and of a tensor's device are now."""

    def __init__(self, tensor: Tensor) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)

    @contextmanager
    def again(self) -> Iterator[None]:
        """From there; afterwards generators go on from where they were."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states)
            yield
