"""Separates computation from communication in a trace with GPU kernels; places the phases.

communication
    A kernel, copy or memset
    (a) whose name contains "nccl", or
    (b) on a side stream, inside a range named `communication:...` that was recorded around its
        launch and that the profiler projected on that stream (category `gpu_user_annotation`).
        That is how a variant that moves bytes with the copy engines says what they are for: peer
        copies, symmetric-memory barriers and the sum all count, as they do inside an NCCL kernel.
        The projected range itself counts as a whole: between its barriers the stream waits for
        the other ranks. The main stream, where most of the forward pass ran, is no side stream.
computation
    Every other kernel, copy and memset.

Phases are recorded on the CPU, which runs ahead of the GPU, so they are placed on the device by
*launch*: a phase's device interval goes from the first start to the last end of the computation
that any thread launched during the phase. (The profiler's own projection follows the CPU thread
that opened the range, but autograd launches backward's kernels from a thread of its own; it is
the fallback where launches are not recorded.) One exception: `gradient_sync` mostly waits, and a
wait has no kernel. It lasts from the end of the computation launched before it to the start of
the computation launched after it.
"""

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from .intervals import Interval, by_name, intervals_of
from .phases import ACCUMULATION, COMMUNICATION_PREFIX

BASIS = "GPU kernels"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
KINDS = {  # attention first: its kernels may be made of a library for matrix products
    "attention": re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE),
    "products": re.compile(r"gemm|nvjet|xmma|cutlass|splitk", re.IGNORECASE),
}


@dataclass(frozen=True)
class Work:
    """All kernels, or all copies, of one name: their number, microseconds and bytes.

    `is_copy`: a memcpy, which a copy engine carries out. A kernel holds multiprocessors.
    """

    name: str
    is_copy: bool
    calls: int
    time: float
    nbytes: int


class Rules:
    """Sorts the events of a trace into computation and communication, by the rules above."""

    basis = BASIS

    def __init__(self, events: list[dict]) -> None:
        self.events = events
        self._side_ranges = _side_ranges(events)
        self._computing, self._communicating = _split(events, self._side_ranges)
        self._launched = _by_launch_time(events, self._computing)
        self.computation = intervals_of(self._computing)  # sorted and not merged
        self.communication = intervals_of(self._communicating + self._side_ranges)

    def collectives(self) -> dict[str, list[Interval]]:
        """Returns name → intervals, in order: projected ranges, and NCCL's kernels."""
        kernels = [e for e in self._communicating if "nccl" in e["name"].lower()]
        return by_name(self._side_ranges + kernels)

    def work_by_name(self, span: Interval) -> tuple[list[Work], list[Work]]:
        """Returns what ran on the device in `span`, by name, as (computing, communicating)."""
        return _by_name(self._computing, span), _by_name(self._communicating, span)

    def place_phases(
        self, on_cpu: dict[str, list[Interval]]
    ) -> tuple[dict[str, list[Interval]], str]:
        """Returns the phases on the device, and how they were placed."""
        launched = self._launched
        if launched:
            placed = {name: _by_launch(launched, ranges) for name, ranges in on_cpu.items()}
            if "gradient_sync" in on_cpu:
                placed["gradient_sync"] = _waits(launched, on_cpu["gradient_sync"])
            return {name: found for name, found in placed.items() if found}, "kernels by launch"
        placed = {name: _projections(self.events, name) for name in on_cpu}
        placed = {name: found for name, found in placed.items() if found}
        if placed:
            return placed, "the profiler's projection"
        return on_cpu, "ranges on the CPU thread"

    def time_in(self, on_cpu: dict[str, list[Interval]]) -> dict[str, float]:
        """Returns how long the computation ran that any thread launched during the ranges."""
        return {
            name: sum(
                end - start for r in ranges for _, start, end in _launched_in(self._launched, r)
            )
            for name, ranges in on_cpu.items()
        }

    def gradients(self) -> list[float]:
        """Returns when each gradient was final: all was done that was launched before its node."""
        ends = list(accumulate((end for _, _, end in self._launched), max))
        nodes = sorted(e["start"] for e in self.events if e["name"] == ACCUMULATION)
        places = [bisect_left(self._launched, (node,)) for node in nodes]
        return [ends[place - 1] for place in places if place]

    def kinds(self) -> dict[str, list[Interval]]:
        """Returns the kernels of each kind of arithmetic; a kernel has the first kind that fits."""
        found: dict[str, list[dict]] = {kind: [] for kind in KINDS}
        for event in self._computing:
            kind = next((k for k, pattern in KINDS.items() if pattern.search(event["name"])), None)
            if kind and event.get("cat") == "kernel":
                found[kind].append(event)
        return {kind: intervals_of(own) for kind, own in found.items()}


def _by_name(events: list[dict], span: Interval) -> list[Work]:
    """Adds up events of one name; a copy's bytes are those that the profiler recorded."""
    found: dict[tuple[bool, str], list[dict]] = {}
    for event in events:
        if span[0] <= event["start"] < span[1]:
            is_copy = event["cat"] == "gpu_memcpy"
            found.setdefault((is_copy, event["name"]), []).append(event)
    return [
        Work(
            name=name,
            is_copy=is_copy,
            calls=len(own),
            time=sum(e["end"] - e["start"] for e in own),
            nbytes=sum(e.get("args", {}).get("bytes", 0) for e in own) if is_copy else 0,
        )
        for (is_copy, name), own in found.items()
    ]


def _split(events: list[dict], side_ranges: list[dict]) -> tuple[list[dict], list[dict]]:
    """Returns the device's events as (computing, communicating)."""
    by_stream: dict[tuple, list[dict]] = {}
    for event in side_ranges:
        by_stream.setdefault(_stream(event), []).append(event)
    computing: list[dict] = []
    communicating: list[dict] = []
    for event in events:
        if event.get("cat") in ON_DEVICE:
            inside = any(
                around["start"] <= event["start"] and event["end"] <= around["end"]
                for around in by_stream.get(_stream(event), ())
            )
            is_communication = inside or "nccl" in event["name"].lower()
            (communicating if is_communication else computing).append(event)
    return computing, communicating


def _side_ranges(events: list[dict]) -> list[dict]:
    """Returns the projected `communication:...` ranges that are not on the main stream."""
    main = _main_stream(events)
    projected = [e for e in events if e.get("cat") == "gpu_user_annotation"]
    named = [e for e in projected if e["name"].startswith(COMMUNICATION_PREFIX)]
    return [e for e in named if _stream(e) != main]


def _main_stream(events: list[dict]) -> tuple | None:
    """Returns the stream with most of the forward pass's launches, else with most kernels."""
    forwards = [
        (e["start"], e["end"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"] == "forward_pass"
    ]
    launch_times = _launch_times(events)
    kernels = [e for e in events if e.get("cat") == "kernel"]
    in_forward = [
        event
        for event in kernels
        if any(a <= launch_times.get(_correlation(event), -1) < b for a, b in forwards)
    ]
    counts = Counter(_stream(event) for event in in_forward or kernels)
    return counts.most_common(1)[0][0] if counts else None


def _stream(event: dict) -> tuple:
    """Returns device and stream, which stand where a CPU event has process and thread."""
    return event["pid"], event["tid"]


def _by_launch_time(events: list[dict], computing: list[dict]) -> list[tuple[float, float, float]]:
    """Returns (launch on the CPU, start, end) of each computation, in launch order."""
    launch_times = _launch_times(events)
    return sorted(
        (launch_times[_correlation(event)], event["start"], event["end"])
        for event in computing
        if _correlation(event) in launch_times
    )


def _launch_times(events: list[dict]) -> dict[int, float]:
    """Returns correlation number → when the CPU launched it."""
    launches = [event for event in events if event.get("cat") in LAUNCHES]
    return {_correlation(event): event["start"] for event in launches}


def _correlation(event: dict) -> int | None:
    """Returns the number that a kernel shares with the runtime call that launched it."""
    return event.get("args", {}).get("correlation", id(event))


def _by_launch(
    launched: list[tuple[float, float, float]], ranges: list[Interval]
) -> list[Interval]:
    """Returns, per range on the CPU, first start to last end of what was launched in it."""
    placed = []
    for range_ in ranges:
        inside = _launched_in(launched, range_)
        if inside:
            placed.append((min(k[1] for k in inside), max(k[2] for k in inside)))
    return placed


def _launched_in(
    launched: list[tuple[float, float, float]], range_: Interval
) -> list[tuple[float, float, float]]:
    start, end = range_
    return launched[bisect_left(launched, (start,)) : bisect_left(launched, (end,))]


def _waits(launched: list[tuple[float, float, float]], ranges: list[Interval]) -> list[Interval]:
    """Returns, per gradient_sync, the gap between what was launched before and what follows."""
    placed = []
    for start, end in ranges:
        first, last = bisect_left(launched, (start,)), bisect_left(launched, (end,))
        before, inside, after = launched[:first], launched[first:last], launched[last:]
        begins = max((k[2] for k in before), default=min((k[1] for k in inside), default=None))
        ends = min((k[1] for k in after), default=max((k[2] for k in inside), default=None))
        if begins is not None and ends is not None:
            placed.append((begins, max(begins, ends)))
    return placed


def _projections(events: list[dict], name: str) -> list[Interval]:
    """Returns the profiler's own device ranges of that name on the main stream."""
    main = _main_stream(events)
    projected = [e for e in events if e.get("cat") == "gpu_user_annotation"]
    return intervals_of(e for e in projected if e["name"] == name and _stream(e) == main)
