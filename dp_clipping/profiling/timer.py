"""The phases of a private step, as they are labelled in a trace and timed by the profiling switch.

Which `Timer` a step has was settled when its model was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from dp_clipping.profiling.profile import NOTHING, Profile
from dp_clipping.torch_compat import is_profiling


class Timer:
    """Labels the phases in the trace that a profiler records, and times nothing (switch off)."""

    def phase(self, name: str) -> AbstractContextManager:
        """Returns a context for a phase of a step, which has a label while a profiler records."""
        return record_function(name) if is_profiling() else NOTHING

    def part(self, name: str) -> AbstractContextManager:
        """Times a part of a phase; without the switch it has no label of its own."""
        return NOTHING

    def around_each(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        """Returns a function that takes several things, timed as `part` times; here itself."""
        return function

    def labels_layers(self) -> bool:
        """Returns whether `layers` does anything now."""
        return is_profiling()

    def layers(self, what: str, *parameters: Any) -> AbstractContextManager:
        """Labels work `{what}/{layer}` (`+` between layers) while a profiler records."""
        return record_function(self._label(what, parameters)) if is_profiling() else NOTHING

    def note_norms(self, own: Callable[[], Tensor | None], squared: Tensor) -> None:
        """Records nothing. `squared`: norms [K, B]; `own`: those of this rank's parts."""

    def abandon(self) -> None:
        """Drops the step that is under way: it has failed, or its sums are dropped."""

    def _label(self, what: str, parameters: tuple[Any, ...]) -> str:
        return f"{what}/{'+'.join(p.name for p in parameters)}"


class ProfileTimer(Timer):
    """Times every phase and part: the switch is on."""

    def __init__(self, profile: Profile):
        self._profile = profile

    def phase(self, name: str) -> Any:
        return self._profile.range(name)

    part = phase

    def around_each(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def timed(several: Iterable[Any]) -> None:
            for one in several:  # which may be formed only now
                with self.part(name):
                    function([one])

        return timed

    def labels_layers(self) -> bool:
        return True

    def layers(self, what: str, *parameters: Any) -> Any:
        return self._profile.range(self._label(what, parameters))

    def note_norms(self, own: Callable[[], Tensor | None], squared: Tensor) -> None:
        self._profile.note_norms(own(), squared)

    def abandon(self) -> None:
        self._profile.abandon()


def timer_of(profile: Profile | None) -> Timer:
    """Returns the timer of a model with this profile; None: the switch is off."""
    return Timer() if profile is None else ProfileTimer(profile)
