"""Summarises each sample's values in a tensor by a few numbers, to compare two runs.

A summary of a tensor with B samples is [B, SIGNS + 1]: each sample's sum under several fixed random
signs, and its norm. Two samples of different values have different sums but for chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import available
from dp_clipping.kernels.signed_sums import SIGNS, signed_sums, signed_sums_plain
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.trials.tolerances import BESIDE, WHOLE


class Summary(NamedTuple):
    """Sums up a tensor with B samples.

    Attributes:
        values: [B, SIGNS + 1], as they were computed.
        tolerance: the largest difference that is no finding, relative to the norm of a sample.
        shape: the shape of each sample's values.
    """

    values: Tensor
    tolerance: float
    shape: tuple[int, ...] = ()

    def without_first(self) -> "Summary":
        """Returns that of the other samples."""
        return self._replace(values=self.values[1:])


def compared(pairs: Sequence[tuple[Summary, Summary]], stays: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how much the samples that stay differ [P, S, SIGNS + 1], and may differ [P, S, 1].

    Values that are not finite count as zero: a bad sample is no sign of mixing.
    """
    one, other = (
        torch.stack([found.values for found in side]).double()[:, stays].nan_to_num(0, 0, 0)
        for side in zip(*pairs, strict=True)
    )
    tolerances = one.new_tensor([found.tolerance for found, _ in pairs])[:, None, None]
    return (one - other).abs(), tolerances * torch.maximum(one[..., SIGNS:], other[..., SIGNS:])


def differ(pairs: Sequence[tuple[Summary, Summary]], stays: Tensor) -> list[bool]:
    """Returns which summaries of two runs differ in a sample that stays; the host waits once."""
    if not pairs:
        return []
    change, room = compared(pairs, stays)
    return (change > room).flatten(1).any(1).tolist()


@dataclass
class Seen:
    """Collects what was observed in one run.

    Attributes:
        summaries: (layer, what, number of its call) -> what it had of each sample, in the order of
            the run; `what` is `"input"`, `"output"` (of the network) or `"gradient"`, and of an
            operator with a module's own parameter `"operand"`, or `"result"`: its gradient.
        is_random: the network has drawn random numbers.
    """

    summaries: dict[tuple[str, str, int], Summary] = field(default_factory=dict)
    is_random: bool = False
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, name: str, what: str, summary: Summary) -> None:
        number = self._calls.get((name, what), 0)
        self._calls[name, what] = number + 1
        self.summaries[name, what, number] = summary


def summary(x: Tensor, layout: Layout, batch_size: int) -> Summary:
    """Returns each sample's values in x."""
    is_float = x.is_floating_point() or x.is_complex()
    tolerance = BESIDE.of(x.dtype) if is_float else WHOLE
    x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    if not x.numel():
        return Summary(x.new_zeros(batch_size, SIGNS + 1, dtype=torch.float64), tolerance)
    rows = layout.batch_first(x, batch_size)
    shape = tuple(rows.shape[1:])
    rows = rows.reshape(batch_size, -1)
    if rows.is_cuda and available(rows.device, rows.dtype):
        return Summary(signed_sums(rows), tolerance, shape)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32) if is_float else torch.float64)
    return Summary(signed_sums_plain(rows), tolerance, shape)
