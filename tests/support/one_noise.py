"""Noise on one sum, through the function that adds it to all of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
from dp_clipping.noise.add_noise import add_noise_to_all
from dp_clipping.noise.gaussian import GAUSSIAN, NoiseStream, Values

# Words with and without the sign bit, and ones that Triton would make constants of: 0, 1, 16.
STREAMS = [
    NoiseStream.derive(bytes(32), step=5, parameter="weight", share=1),
    NoiseStream(0, 0, 0, 0),
    NoiseStream(1, 0, 1, 16),
    NoiseStream(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
    NoiseStream(0xA4093822, 0x299F31D0, 0x13198A2E, 0x83707344),
]


def add_noise(
    total: Tensor,
    stream: NoiseStream,
    *,
    std: float,
    divisor: float = 1.0,
    dtype: torch.dtype | None = None,
    offset: int = 0,
    place: Place | None = None,
    values: Values = GAUSSIAN,
    earlier: Sequence[tuple[float, NoiseStream]] = (),
) -> Tensor:
    """Returns the noisy sum; `total` is left as it is, and begins at `offset` of the stream."""
    if offset:
        n = total.numel()
        place = (Span(0, offset, n, n, 1),) if n else ()
    (noisy,) = add_noise_to_all(
        [total.clone()], [stream], std=std, divisor=divisor, dtypes=[dtype or total.dtype],
        places=None if place is None else [place], values=values,
        earlier=[(weight, [other]) for weight, other in earlier],
    )  # fmt: skip
    return noisy
