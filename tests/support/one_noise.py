"""Noise on one sum, through the function that adds it to all of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dp_clipping.distributed.placement import Place, Span
from dp_clipping.noise.add_noise import add_noise_to_all
from dp_clipping.noise.gaussian import GAUSSIAN, NoiseStream, Values


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
