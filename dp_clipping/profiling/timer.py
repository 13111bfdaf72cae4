"""The phases of a private step: labelled in a trace, and timed by the profiling switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from dp_clipping.profiling.profile import NOTHING, Profile
from dp_clipping.torch_compat import is_profiling


class Timer:
    """Labels the phases in the trace that a profiler records, and times them with the switch on.

    Args:
        profile: the profile of the model's steps; None: the switch is off.
    """

    def __init__(self, profile: Profile | None):
        self._profile = profile

    def phase(self, name: str) -> AbstractContextManager:
        """Returns a context for a phase of a step, which has a label while a profiler records."""
        if self._profile is not None:
            return self._profile.range(name)
        return record_function(name) if is_profiling() else NOTHING

    def part(self, name: str, is_labelled: bool = True) -> AbstractContextManager:
        """Times a part of a phase; without the switch, or by request, it has no label."""
        return NOTHING if self._profile is None else self._profile.range(name, is_labelled)

    def around_each(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        """Returns a function that takes several things, timed as `part` times."""
        if self._profile is None:
            return function

        def timed(several: Iterable[Any]) -> None:
            for one in several:  # which may be formed only now
                with self.part(name):
                    function([one])

        return timed

    def labels_layers(self) -> bool:
        """Returns whether `layers` does anything now."""
        return self._profile is not None or is_profiling()

    def layers(self, what: str, parameters: Iterable[Any]) -> AbstractContextManager:
        """Labels and times work `{what}/{layer}` (`+` between layers), as a phase."""
        return self.phase(f"{what}/{'+'.join([p.name for p in parameters])}")

    def note_norms(self, own: Callable[[], Tensor | None], squared: Tensor) -> None:
        """Records norms [K, B] with the switch on; `own`: those of this rank's parts."""
        if self._profile is not None:
            self._profile.note_norms(own(), squared)

    def abandon(self) -> None:
        """Drops the step that is under way: it has failed, or its sums are dropped."""
        if self._profile is not None:
            self._profile.abandon()
