"""Runs a subject as it is, and with other samples in some places, and tells what differs.

Clipping bounds a sample's influence only if the other samples' gradients do not depend on it. So a
batch is run twice with the same random numbers, the second time with other samples in some places.
For the samples that stay, nothing that the subject shows of them may change. Shapes, places and
noise are the same in both runs, so nothing but the other samples can change it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor

from dp_clipping.trials.draws import ExpectedDraws
from dp_clipping.trials.perturb import SIDES, Perturbed
from dp_clipping.trials.seen import Key, Seen, Summary, compared, differ
from dp_clipping.trials.tolerances import RANDOM, TIMES


class Subject(Protocol):
    """Something that is run with other samples in some places.

    Attributes:
        device: of its tensors.
        repeats: how often it is run with errors of the size of rounding, where it differs.
    """

    device: torch.device
    repeats: int

    def run(self, perturbed: Perturbed | None = None, seed: int | None = None) -> Seen:
        """Runs it, with the random numbers that come next, which are set back.

        Args:
            perturbed: the samples of this run; None: its own.
            seed: of errors of the size of rounding; None: there are none.
        """
        ...


class Probe:
    """Compares runs of one subject with its first one.

    Args:
        on_any_rank: returns whether a flag is set on any rank that runs the subject together.

    Attributes:
        base: what the subject shows of its own samples.
    """

    def __init__(self, subject: Subject, on_any_rank: Callable[[bool], bool] = bool):
        self._subject, self._on_any_rank = subject, on_any_rank
        self.base = subject.run()
        self.beside = self.base

    def differing(self, perturbed: Perturbed) -> list[Key] | None:
        """Returns what is shown otherwise of samples that stay, in the order of the run.

        Where there is something, the first run is repeated with errors of the size of rounding.
        What changes as much by these tells nothing. Neither does one sample more where numbers are
        drawn: they have other shapes.

        Returns:
            None: the subject does not run with such samples, and need not.
        """
        try:
            self.beside = self._beside(self.base, perturbed)
        except Exception:
            if not perturbed.may_fail:
                raise
            return None
        stays = perturbed.stays.to(self._subject.device)
        base, changed = self.base, _changed(self.base, self.beside, stays)
        with ExitStack() as stack:
            if self._on_any_rank(bool(changed) and base.is_random):
                stack.enter_context(ExpectedDraws())
                base = self._subject.run()
                self.beside = self._beside(base, perturbed)
                changed = _changed(base, self.beside, stays)
            rooms: dict[Key, Tensor] = {}
            for seed in range(self._subject.repeats):
                if not self._on_any_rank(bool(changed)):
                    break
                again = self._subject.run(seed=seed)
                for key in changed:
                    room = _by_chance(base.summaries[key], again.summaries.get(key))
                    rooms[key] = torch.maximum(room, rooms.get(key, room))
                changed = _changed(base, self.beside, stays, {key: rooms[key] for key in changed})
        return changed

    def _beside(self, base: Seen, perturbed: Perturbed) -> Seen:
        """Runs with other samples; returns what is shown of those that have a place."""
        beside = self._subject.run(perturbed)
        if perturbed.more:
            is_random = base.is_random or beside.is_random
            shown, place = {} if is_random else beside.summaries, SIDES.index(perturbed.more)
            beside.summaries = {key: found.without(-place) for key, found in shown.items()}
        return beside


def _changed(
    base: Seen, beside: Seen, stays: Tensor, rooms: dict[Key, Tensor] | None = None
) -> list[Key]:
    """Returns what differs of samples that stay, or what of `rooms` does by more than these."""
    keys = [key for key in (base.summaries if rooms is None else rooms) if key in beside.summaries]
    pairs = [(base.summaries[key], beside.summaries[key]) for key in keys]
    flags = differ(pairs, stays, () if rooms is None else list(rooms.values()))
    return [key for key, flag in zip(keys, flags, strict=True) if flag]


def _by_chance(one: Summary, again: Summary | None) -> Tensor:
    """Returns how much samples may change [B, 1], from a run that was repeated."""
    if again is None:
        return one.values.new_full((len(one.values), 1), torch.inf)
    change, _ = compared([(again, one)])
    _, size = compared([(one, one)])
    change = change[0].amax(1, keepdim=True)
    return (TIMES * change).where(change <= RANDOM * size[0], torch.inf)
