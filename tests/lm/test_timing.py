"""Clocks, the peak of memory, and the costs of steps."""

import mmap
import time

import pytest
import torch

from ddp_by_hand.lm import timing
from ddp_by_hand.lm.timing import PeakMemory, StepClock, time_steps

CPU = torch.device("cpu")


def test_the_clock_measures_what_is_between_marks():
    clock = StepClock(CPU)
    clock.mark()
    assert clock.milliseconds() == []
    for seconds in (0.01, 0.03):
        time.sleep(seconds)
        clock.mark()
    first, second = clock.milliseconds()
    assert 10 <= first < second
    assert 30 <= second < 300


def touch_new_pages(size):
    """Pages of the system: a tensor may lie in memory that earlier tests left resident."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1


def test_peak_memory_sees_what_was_freed_and_is_unknown_where_it_cannot_be_reset(monkeypatch):
    size = 200 << 20
    memory = PeakMemory(CPU)
    before = memory.bytes()
    if before is None:
        pytest.skip("this system does not reset the peak")
    touch_new_pages(size)
    assert memory.bytes() >= before + 0.9 * size
    assert PeakMemory(CPU).bytes() < before + 0.5 * size
    monkeypatch.setattr(timing, "_reset_resident_peak", lambda: False)
    assert PeakMemory(CPU).bytes() is None


class Sleeper:
    def __init__(self):
        self.done: list = []

    def backward(self, batch):
        time.sleep(0.02)
        self.done.append(batch)

    def step(self):
        time.sleep(0.01)


def test_steps_after_the_warm_up_are_timed_in_two_parts():
    sleeper, places = Sleeper(), []
    costs = time_steps(sleeper, range(5), 2, CPU, places.append, lambda: places.append("warmed up"))
    assert sleeper.done == [0, 1, 2, 3, 4]
    assert places[1:4] == ["warm-up step 2", "warmed up", "step 1"]
    assert len(costs.step_ms) == len(costs.backward_ms) == 3
    for backward, step in zip(costs.backward_ms, costs.step_ms, strict=True):
        assert 20 <= backward <= step - 10
    assert costs.peak_mb is None or costs.peak_mb > 10
