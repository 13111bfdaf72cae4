"""Sources of noise: where the noise on the clipped sums of a step comes from."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place
from dp_clipping.noise.add_noise import add_noise_to_all
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.gaussian import GAUSSIAN, NoiseStream, Values
from dp_clipping.noise.kernel import StreamTable
from dp_clipping.noise.mechanisms import mechanism_of


class NoiseSource(Protocol):
    """Adds the noise of a step to clipped sums. It keeps nothing from one step to the next.

    Attributes:
        spans_steps: noise of earlier steps is in that of a step, so σ and C must never change.
    """

    spans_steps: bool

    def add(
        self, totals: list[Tensor], parameters: Sequence[str], *, key: bytes, step: int, std: float,
        divisor: float, dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
        table: StreamTable | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Returns (total + std·noise) / divisor of each total, in order.

        The noise of an element is a function of the key, the step, the parameter and the element's
        place in it alone, so shards, replicas and resumed runs agree on it.

        Args:
            totals: float32 (or float64, for tests), any shapes; those whose dtype stays are
                overwritten.
            parameters: the full name of the parameter that each total belongs to.
            key: the noise key of the run, 32 bytes.
            step: the optimizer step, from 0.
            std: standard deviation of the noise on a sum, σC; 0 adds nothing.
            divisor: the expected global batch size, a public constant.
            dtypes: the dtypes of the results.
            places: where each total lies in its parameter; None: it is the whole.
            table: where a CUDA graph that is captured reads the streams of whole parameters.
        """
        ...


class AddressedNoise:
    """Noise of `NoiseStream`s: that of a step alone, or with the noise of earlier steps.

    Args:
        values: how random words become noise; default: normal numbers.
        correlated: how many earlier steps' noise is generated again, and with which weights.
    """

    def __init__(
        self, values: Values = GAUSSIAN, correlated: CorrelatedNoise | None = None
    ) -> None:
        self.values, self.correlated = values, correlated
        self.spans_steps = correlated is not None

    def add(
        self, totals: list[Tensor], parameters: Sequence[str], *, key: bytes, step: int, std: float,
        divisor: float, dtypes: list[torch.dtype], places: Sequence[Place | None] | None = None,
        table: StreamTable | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Returns (total + std·Σ_j w_j z_{step-j}) / divisor of each total; one pass over them."""
        streams = partial(NoiseStream.derive_all, key, parameters=parameters, share=0)
        earlier = []
        if self.correlated is not None:
            _, *weights = self.correlated.weights(step + 1)
            earlier = [(weight, streams(step=step - j)) for j, weight in enumerate(weights, 1)]
        return add_noise_to_all(
            totals, streams(step=step), std=std, divisor=divisor, dtypes=dtypes, places=places,
            table=table, values=self.values, earlier=earlier,
        )  # fmt: skip


def source_of(noise_mechanism: str | CorrelatedNoise) -> NoiseSource:
    """Returns the source of a noise mechanism's noise.

    Raises:
        ValueError: for a mechanism that was not registered.
    """
    if isinstance(noise_mechanism, CorrelatedNoise):
        return AddressedNoise(correlated=noise_mechanism)
    mechanism = mechanism_of(noise_mechanism)
    return AddressedNoise(GAUSSIAN if mechanism is None else mechanism.values)
