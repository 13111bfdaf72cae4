"""Measures what bounds a step: the host that launches kernels, or the kernels themselves.

| entry of a cell | |
| --- | --- |
| `host_ms` | until a complete step is issued, without waiting for the GPU at its end; median |
| `kernel_ms` | of one step, all kernels, copies and fills that it ran, added up |
| `launches` | how many those were |
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from ddp_by_hand.lm.timing import Trainee
from ddp_by_hand.measure import summarize
from ddp_by_hand.measure.runs import Cell

STEPS = 3  # whose host time is taken
BOUND = 0.9  # of a step's time: what takes as much bounds it
LEGEND = """\
host: until a step is issued, waits for the GPU within it included; kernels: of one step, added up;
bound: which of the two takes at least nine tenths of the step (kernels first)"""


def bounds_of(training: Trainee, batch: Any, device: torch.device) -> dict[str, float]:
    """Returns the three entries; nothing on a CPU, where the step is all there is."""
    if device.type != "cuda":
        return {}
    return {"host_ms": median(_host_ms(training, batch) for _ in range(STEPS))} | _kernels(
        training, batch
    )


def _host_ms(training: Trainee, batch: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    training.backward(batch)
    training.step()
    return (time.perf_counter() - start) * 1e3


def _kernels(training: Trainee, batch: Any) -> dict[str, float]:
    found = kernels_of(training, batch).values()
    return {
        "kernel_ms": sum(ms for ms, _ in found),
        "launches": round(sum(launches for _, launches in found)),
    }


def kernels_of(training: Trainee, batch: Any, steps: int = 1) -> dict[str, tuple[float, float]]:
    """Returns name -> milliseconds and launches of one step, means over `steps`.

    Copies and fills are among them.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorder:
        for _ in range(steps):
            training.backward(batch)
            training.step()
        torch.cuda.synchronize()
    return {
        event.key: (event.self_device_time_total / 1e3 / steps, event.count / steps)
        for event in recorder.key_averages()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    }


def describe_bounds(cell: Cell) -> dict[str, str]:
    """Returns the entries, formatted, and the bound of a step.

    It is `kernels`, `host` or, if neither takes nearly all of the step, `neither`.
    """
    host, kernels = cell.facts.get("host_ms"), cell.facts.get("kernel_ms")
    if host is None:
        return {}
    least = BOUND * summarize(cell.samples()).median
    bound = "kernels" if kernels >= least else "host" if host >= least else "neither"
    return {
        "host ms": f"{host:.1f}", "kernel ms": f"{kernels:.1f}",
        "launches": f"{cell.facts['launches']:,}", "bound": bound,
    }  # fmt: skip
