"""Times of steps, measured without stopping the device in between, and peak memory."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

MIB = 1 << 20


class StepClock:
    """Measures durations of consecutive steps, without stopping the device in between.

    On a GPU a mark is an event in the stream, read when all steps are over; on a CPU it is the
    monotonic clock. `mark()` before the first step and after each.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Returns one duration per step, after synchronizing the device."""
        pairs = list(zip(self._marks[:-1], self._marks[1:], strict=True))
        if self._on_gpu:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [(end - start) * 1e3 for start, end in pairs]


class PeakMemory:
    """Measures peak bytes since construction: the GPU's, or the process's resident set."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._can_reset = _reset_resident_peak()

    def bytes(self) -> int | None:
        """Returns the peak in bytes; None where the system does not report it."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        return _resident_peak() if self._can_reset else None


@dataclass(frozen=True)
class StepCosts:
    """Costs of timed steps: times in milliseconds on the slowest rank, memory of the largest.

    Attributes:
        step_ms: complete steps.
        backward_ms: the time of each step's forward, backward, clipping and every exchange between
            ranks.
        peak_bytes: None where the system cannot tell.
    """

    step_ms: list[float]
    backward_ms: list[float]
    peak_bytes: float | None

    @property
    def peak_mb(self) -> float | None:
        """Peak memory in MiB."""
        return None if self.peak_bytes is None else self.peak_bytes / MIB


class Trainee(Protocol):
    """A network in training whose steps have two parts, which are timed apart."""

    def backward(self, batch: Any) -> None:
        """Runs forward and backward, with clipping and every exchange between ranks."""

    def step(self) -> None:
        """Adds noise, runs the optimizer and sets gradients to None."""


def time_steps(
    trainee: Trainee,
    batches: Sequence[Any],
    warm_up: int,
    device: torch.device,
    note: Callable[[str], None] = lambda where: None,
    warmed_up: Callable[[], None] = lambda: None,
) -> StepCosts:
    """Takes one step a batch and times those after the first `warm_up`.

    Args:
        note: called with the step that begins.
        warmed_up: called between the warm-up and the timed steps.
    """
    for number, batch in enumerate(batches[:warm_up]):
        note(f"warm-up step {number + 1}")
        trainee.backward(batch)
        trainee.step()
    # A first step leaves gradients in cycles of FSDP2's objects, in any mode (seen with torch
    # 2.11), and it is by chance when Python finds them.
    gc.collect()
    wait_for_all(device)
    warmed_up()
    clock, memory = StepClock(device), PeakMemory(device)
    clock.mark()
    for number, batch in enumerate(batches[warm_up:]):
        note(f"step {number + 1}")
        trainee.backward(batch)
        clock.mark()
        trainee.step()
        clock.mark()
    marks = clock.milliseconds()
    whole = [a + b for a, b in zip(marks[0::2], marks[1::2], strict=True)]
    peak = max_over_ranks([float(memory.bytes() or 0)], device)[0]
    return StepCosts(
        max_over_ranks(whole, device), max_over_ranks(marks[0::2], device), peak or None
    )


def max_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Returns the maximum over ranks of each value, on every rank."""
    if not dist.is_initialized():
        return list(values)
    together = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    return together.tolist()


def wait_for_all(device: torch.device) -> None:
    """Synchronizes the device, then the ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def release_memory(device: torch.device) -> None:
    """Frees unused memory, and graphs compiled for other shapes."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reset_resident_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: reset VmHWM
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
