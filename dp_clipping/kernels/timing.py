"""Times of calls on one device, taken so that they can be compared with each other.

Calls take turns, round by round, so that a change of the clock meets all of them. A sample is a
number of calls behind a kernel that only spins: the host runs ahead, and what is timed is the
device, not Python. One that a busy host has fallen behind is taken again. Each call is given its
number, by which it can choose its operands: those of the call before would still be in the
second-level cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import torch

from dp_clipping.torch_compat import spin

TimedCall = Callable[[int], Any]

SAMPLE_MS = 1.0  # a sample lasts about this long, or one call
MOST_CALLS = 32  # of a sample: further launches would wait for a place in the queue
WARM_UP = 3  # calls whose times only say how many make a sample
LEAD = 1.5  # the spinning lasts that many times what the host takes
SPIN_RATE = 2e9  # cycles a second, no less than any clock
TRIES = 4  # of a sample that the host was not ahead of; the last one counts


def interleaved(
    calls: Mapping[str, TimedCall],
    device: torch.device,
    rounds: int,
    parts: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Returns name -> milliseconds of one call, a sample a round; each second one backward.

    Each is called before, once to be compiled and then WARM_UP times. What a call returns is freed.
    The time of a call that does several things of one kind is divided by their number in `parts`.
    """
    sizes = {name: _sample_size(call, device) for name, call in calls.items()}
    samples = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls) if number % 2 == 0 else list(reversed(calls))
        for name in names:
            elapsed = _sample(calls[name], *sizes[name], device)
            samples[name].append(elapsed / (parts or {}).get(name, 1))
    return samples


def _sample_size(call: TimedCall, device: torch.device) -> tuple[int, float]:
    """Returns how many calls make a sample, and how many seconds the host takes to launch one."""
    call(0)
    _wait(device)
    started = time.perf_counter()
    for number in range(WARM_UP):
        call(number)
    launched = time.perf_counter() - started
    _wait(device)
    elapsed = time.perf_counter() - started
    count = ceil(SAMPLE_MS * 1e-3 * WARM_UP / elapsed)
    return min(count, MOST_CALLS), launched / WARM_UP


def _sample(call: TimedCall, count: int, launch: float, device: torch.device) -> float:
    """Returns milliseconds of one call, the mean of `count` in a row."""
    if device.type != "cuda":
        started = time.perf_counter()
        for number in range(count):
            call(number)
        return (time.perf_counter() - started) * 1e3 / count
    lead = LEAD * launch * count
    for _ in range(TRIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spin(int(lead * SPIN_RATE))
        start.record()
        for number in range(count):
            call(number)
        end.record()
        was_ahead = not start.query()
        end.synchronize()
        if was_ahead:
            break
        lead *= 2  # other work has held the host up, and the device may have waited for it
    return start.elapsed_time(end) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
