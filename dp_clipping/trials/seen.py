"""What a run shows of each sample, and what differs in another run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Key = tuple[Any, ...]


class Summary(NamedTuple):
    """Sums up a tensor with B samples.

    Attributes:
        values: [B, N], the last of each sample its norm.
        tolerance: the largest difference that is no finding, relative to the norm of a sample.
        shape: the shape of each sample's values.
    """

    values: Tensor
    tolerance: float
    shape: tuple[int, ...] = ()

    def without(self, place: int) -> "Summary":
        """Returns that of the other samples; `place` is 0 or -1."""
        return self._replace(values=self.values[:-1] if place else self.values[1:])


def compared(pairs: Sequence[tuple[Summary, Summary]]) -> tuple[Tensor, Tensor]:
    """Returns how much samples differ [P, B, N], and may differ [P, B, 1].

    Values that are not finite count as zero: a bad sample is no sign of mixing.
    """
    one, other = (
        torch.stack([found.values for found in side]).double().nan_to_num(0, 0, 0)
        for side in zip(*pairs, strict=True)
    )
    tolerances = one.new_tensor([found.tolerance for found, _ in pairs])[:, None, None]
    return (one - other).abs(), tolerances * torch.maximum(one[..., -1:], other[..., -1:])


def differ(
    pairs: Sequence[tuple[Summary, Summary]], stays: Tensor, by_chance: Sequence[Tensor] = ()
) -> list[bool]:
    """Returns which summaries of two runs differ in a sample that stays; the host waits once.

    Args:
        stays: [B], which samples do.
        by_chance: how much the samples of each pair may differ in any case [B, 1].
    """
    if not pairs:
        return []
    change, room = compared(pairs)
    if by_chance:
        room = torch.maximum(room, torch.stack(list(by_chance)))
    return ((change > room) & stays.to(room.device)[:, None]).flatten(1).any(1).tolist()


@dataclass
class Seen:
    """Collects what a subject shows of its samples in one run.

    Attributes:
        summaries: what it is -> its values of each sample, in the order of the run.
        is_random: random numbers were drawn.
    """

    summaries: dict[Key, Summary] = field(default_factory=dict)
    is_random: bool = False
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def number(self, name: str, what: str) -> int:
        """Returns the number of the next call of a layer that shows this."""
        number = self._calls.get((name, what), 0)
        self._calls[name, what] = number + 1
        return number

    def add(self, name: str, what: str, summary: Summary, number: int | None = None) -> None:
        """Adds what a call of a layer shows, under name, what it is, and number of the call.

        Args:
            number: of the call whose gradient arrives, since backward comes to the last one first,
                and another run may have more of them; None: the next one.
        """
        number = self.number(name, what) if number is None else number
        self.summaries[name, what, number] = summary
