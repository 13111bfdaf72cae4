"""torch's random numbers: a backward that runs a second time draws what it drew the first time.

A checkpointed block with `preserve_rng_state=False` drops out other units in each of its
recomputations: the norms would be of other gradients than the sums. From the same state the same
numbers come, as long as all who draw come again, in the same order: a second backward that leaves
some of the first one out may do so only if nobody drew.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Randomness:
    """Where torch's generators of the CPU and of a tensor's device are now."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._cpu = tensor, torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)

    @property
    def has_moved(self) -> bool:
        """Whether anybody has drawn since.

        States of a GPU's generator are on the host, a seed and an offset: nobody waits for it.
        """
        _, states = get_device_states(self._tensor)
        pairs = zip([self._cpu, *self._states], [torch.get_rng_state(), *states], strict=True)
        return not all(torch.equal(then, now) for then, now in pairs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draws again from there; afterwards generators go on from where they were."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states)
            yield
