"""The profiling switch: where the time of a private step goes, and what its norms were.

`DP_CLIPPING_PROFILE=1` in the environment turns it on when `make_private` builds the model. Each
range of a step (`RANGES`, `norm/{how}/{layers}`, `sum/{layers}`) then lies between two marks: CUDA
events in the current stream, the host's clock on a CPU. Nothing waits for the device while a step
runs; events are read on request, or when KEPT later steps have passed.

A launch that several layers share is one range with `+` between their names: its time belongs to
all of them together. Ranges nest; `own_ms` is the time of a range without those inside it, so over
all ranges it adds up once. A phase that a mode or a backend does not have is absent.

Times and norms depend on the samples without noise: they are not covered by ε, and with
`hide_unprotected=True` the switch does nothing.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dp_clipping.table import aligned
from dp_clipping.torch_compat import is_profiling

LOG = logging.getLogger(__name__)
SWITCH = "DP_CLIPPING_PROFILE"
KEPT = 32  # steps whose events wait to be read, and norms of as many
LAYERS_SHOWN = 12
LAST = "noise"  # the range that ends a step
LAYERS = ("norm/", "sum/")
TRAVEL = ("hand_over", "reduce_scatter", "gradient_sync")  # what only several ranks have
RANGES = {
    "norm_pass": "first backward, norms included",
    "norm/": "  norms of layers",
    "clip_coefficients": "clip coefficients",
    "norm_all_reduce": "  norm all-reduce",
    "norm_stack": "  stacking of norms",
    "norm_local_sum": "  local sum over layers",
    "weighted_sum": "weighted sums",
    "second_backward": "  second backward",
    "sum/": "  sums of layers",
    "hand_over": "  hand-over of sums",
    "reduce_scatter": "  reduce-scatter",
    "gradient_sync": "gradient sync",
    LAST: "noise",
}
"""Range -> what a report calls it, in the order of a step, indented where it is part of another."""
NOTE = "ms: median over steps, with what lies inside; own: without it, so that own adds up once."
SHARED_NOTE = """\
Synchronisation is never switched off, so there is no time for switching it on again: the first
backward forms no parameter gradient that could be sent; clipped sums are passed to the wrapper."""


class Nothing(AbstractContextManager[None]):
    """A context that does nothing, as `nullcontext`, without a call in Python.

    A private step enters one more than a dozen times, where nothing is recorded or sent.
    """

    # Both are functions in C that take what they are given, and what they return is false.
    __enter__ = staticmethod(bool)  # type: ignore[assignment]
    __exit__ = staticmethod("".format)  # type: ignore[assignment]


NOTHING = Nothing()


def switch_on() -> None:
    """Turns profiling on for models made from now on, here and in processes started from here."""
    os.environ[SWITCH] = "1"


def profile_of(device: torch.device, hide_unprotected: bool, alone: bool) -> Profile | None:
    """Returns a new profile if the switch is on; None: off.

    With `hide_unprotected` it is off: how often a range runs in a step, and how long it takes, tell
    the size of the Poisson batch.
    """
    value = os.environ.get(SWITCH, "0") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r} is neither 1 (on) nor 0 (off)")
    if value == "0":
        return None
    if hide_unprotected:
        LOG.warning("%s=1 does nothing with hide_unprotected=True: times tell batch sizes", SWITCH)
        return None
    return Profile(device, alone)


class Profile:
    """Times and norms of the steps of one model on this rank.

    Args:
        device: whose clock is read.
        alone: no other rank has other samples, so no sum travels: nothing in TRAVEL happens.

    Attributes:
        is_on: False pauses it: nothing is timed, and no norm is noted.
    """

    def __init__(self, device: torch.device, alone: bool = True):
        self.alone, self.is_on = alone, True
        self._clock = _Events(device) if device.type == "cuda" else _HostClock()
        self._spans: list[_Span] = []  # of the step that is open
        self._inner: list[_Span] = []  # ranges that are open, the innermost last
        self._norms: list[dict[str, Tensor]] = []
        self._unread: deque[tuple[list[_Span], list[dict[str, Tensor]]]] = deque()
        self._steps: list[dict[str, Any]] = []

    def range(self, name: str, is_labelled: bool = True) -> AbstractContextManager:
        """Returns a context whose time is taken, and which has a label in a profiler's trace."""
        if not self.is_on or (self.alone and name in TRAVEL):
            return NOTHING
        return self._timed(name, is_labelled)

    @contextmanager
    def _timed(self, name: str, is_labelled: bool) -> Iterator[None]:
        # A label costs more than both marks.
        with record_function(name) if is_labelled and is_profiling() else NOTHING:
            span = _Span(name, self._inner[-1] if self._inner else None, self._clock.mark())
            self._spans.append(span)
            self._inner.append(span)
            try:
                yield
            finally:
                span.end = self._clock.mark()
                is_abandoned = not self._inner
                if not is_abandoned:
                    self._inner.pop()
        if name == LAST and not is_abandoned:
            self._unread.append((self._spans, self._norms))
            self._spans, self._norms = [], []
            if len(self._unread) > KEPT:  # long over: its events are read without waiting
                self._read(*self._unread.popleft(), with_norms=False)

    def note_norms(self, before: Tensor | None, after: Tensor) -> None:
        """Records squared norms [K, B] of one backward.

        `before`: of this rank's parts alone; None where no all-reduce adds up parts.
        """
        if self.is_on:
            found = {} if before is None else {"before": before}
            self._norms.append(found | {"after": after})

    def abandon(self) -> None:
        """Drops the step that is under way: it has failed, or its sums are dropped."""
        self._spans, self._inner, self._norms = [], [], []

    def steps(self) -> list[dict[str, Any]]:
        """Returns finished steps as plain data for JSON.

        `ranges` is {name: {ms, own_ms, calls}}. `norms` is a list of {"before"|"after": {shape,
        mean, max}}, one per backward. Only the last KEPT steps have norms.

        On a GPU it waits for the last step.
        """
        while self._unread:
            self._read(*self._unread.popleft(), with_norms=True)
        return self._steps

    def forget(self) -> None:
        """Drops finished steps, for example of a warm-up."""
        self._unread.clear()
        self._steps.clear()

    def data(self) -> dict[str, Any]:
        """Returns `ranges` with medians over steps, and `norms` of the last one; see `steps`."""
        steps = self.steps()
        return {
            "covered_by_epsilon": False,
            "clock": self._clock.name,
            "steps": len(steps),
            "ranges": self.median(),
            "norms": steps[-1]["norms"] if steps else [],
        }

    def median(self) -> dict[str, dict[str, float]]:
        """Returns range -> medians of ms, own_ms and calls over the steps that have it."""
        found: dict[str, list[dict[str, float]]] = {}
        for step in self.steps():
            for name, times in step["ranges"].items():
                found.setdefault(name, []).append(times)
        return {
            name: {key: median(one[key] for one in own) for key in ("ms", "own_ms", "calls")}
            for name, own in found.items()
        }

    def report(self) -> str:
        """Returns a table of the ranges, the slowest layers, and the norms of the last step."""
        steps, times = self.steps(), self.median()
        lines = [
            f"Profile of {len(steps)} private steps on this rank, by {self._clock.name}. Not "
            "covered by ε: for looking, not for publishing.", "",
        ]  # fmt: skip
        if not steps:
            return lines[0] + " No step has ended yet."
        layers = {what: [t for n, t in times.items() if n.startswith(what)] for what in LAYERS}
        found = times | {what: _total(own) for what, own in layers.items() if own}
        rows = [(title, found[name]) for name, title in RANGES.items() if name in found]
        lines += [*_table("phase", rows), ""]
        for what in LAYERS:
            own = {name: t for name, t in times.items() if name.startswith(what)}
            slowest = sorted(own.items(), key=lambda item: -item[1]["ms"])
            rows = [(_short(name), t) for name, t in slowest[:LAYERS_SHOWN]]
            if slowest[LAYERS_SHOWN:]:
                rest = [t for _, t in slowest[LAYERS_SHOWN:]]
                rows.append((f"{len(rest)} others", _total(rest)))
            lines += [*_table(f"slowest of {what}", rows), ""] if rows else []
        notes = [NOTE] if self.alone else [NOTE, SHARED_NOTE]
        return "\n".join([*lines, *notes, *self._norm_lines()])

    def _norm_lines(self) -> list[str]:
        lines = []
        for norms in self._steps[-1]["norms"]:
            for when, one in norms.items():
                place = "" if self.alone else ", which no all-reduce adds up"
                place = f" {when} the all-reduce" if "before" in norms else place
                lines.append(
                    f"squared norms{place}: shape {one['shape']}, mean {_number(one['mean'])}, "
                    f"maximum {_number(one['max'])}"
                )
        return lines

    def _read(self, spans: list[_Span], norms: list[dict], with_norms: bool) -> None:
        ranges: dict[str, dict[str, float]] = {}
        for span in spans:
            span.ms = self._clock.milliseconds(span.start, span.end)
            if span.outer is not None:
                span.outer.inside += span.ms
        for span in spans:
            one = ranges.setdefault(span.name, {"ms": 0.0, "own_ms": 0.0, "calls": 0})
            one["ms"] += span.ms
            one["own_ms"] += span.ms - span.inside
            one["calls"] += 1
        self._clock.release([mark for span in spans for mark in (span.start, span.end)])
        looked = [
            {when: _of_norms(x) for when, x in one.items()} for one in (norms if with_norms else [])
        ]
        self._steps.append({"ranges": ranges, "norms": looked})


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


@dataclass(eq=False)
class _Span:
    """One range, from its entry to its exit, inside of another one."""

    name: str
    outer: _Span | None
    start: Any
    end: Any = None
    ms: float = 0.0
    inside: float = 0.0  # ms of the ranges in it


class _HostClock:
    name = "the host's clock"
    mark = staticmethod(time.perf_counter)

    @staticmethod
    def milliseconds(start: float, end: float) -> float:
        return 1e3 * (end - start)

    def release(self, marks: Sequence[float]) -> None:
        """Does nothing: numbers hold no resource."""


class _Events:
    """Marks in the current stream, used again once they have been read."""

    name = "CUDA events"

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def milliseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)

    def release(self, marks: Sequence[torch.cuda.Event]) -> None:
        self._free += marks


def _of_norms(squares: Tensor) -> dict[str, Any]:
    """Returns None for what is not finite, which JSON knows; an empty batch has no mean."""
    values = [x.item() for x in (squares.mean(), squares.max())] if squares.numel() else [math.nan]
    mean, largest = (x if math.isfinite(x) else None for x in (values[0], values[-1]))
    return {"shape": list(squares.shape), "mean": mean, "max": largest}


def _total(times: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: sum(one[key] for one in times) for key in ("ms", "own_ms", "calls")}


def _table(head: str, rows: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    cells = [(head, "ms", "own ms", "calls")]
    cells += [(n, f"{t['ms']:.3f}", f"{t['own_ms']:.3f}", f"{t['calls']:g}") for n, t in rows]
    return aligned(cells, [False, True, True, True])


def _short(name: str) -> str:
    first, *others = name.split("+")
    return f"{first} and {len(others)} more, one launch" if others else first


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"
