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

from lm.timing import Trainee

STEPS = 3  # whose host time is taken
BOUND = 0.9  # of a step's time: what takes as much bounds it


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
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorder:
        training.backward(batch)
        training.step()
        torch.cuda.synchronize()
    events = [
        event
        for event in recorder.key_averages()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return {
        "kernel_ms": sum(event.self_device_time_total for event in events) / 1e3,
        "launches": sum(event.count for event in events),
    }


def bound_by(step_ms: float, cell: dict) -> str | None:
    """Returns the bound of a step: `kernels`, `host` or, if neither takes nearly all, `neither`."""
    if "host_ms" not in cell:
        return None
    if cell["kernel_ms"] >= BOUND * step_ms:
        return "kernels"
    return "host" if cell["host_ms"] >= BOUND * step_ms else "neither"
