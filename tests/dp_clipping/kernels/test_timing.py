"""Times of calls on a device that is not here."""

import pytest
import torch

from dp_clipping.kernels import timing


class Device:
    """A clock on which calls take no time, spinning takes what it is told, and the host what it
    takes: whether an event has been reached is known from that."""

    def __init__(self, monkeypatch, launches: list[float]):
        self.now = self.busy_until = 0.0  # seconds of the host; when the device has nothing to do
        self.launches = launches  # seconds that the host takes for each sample
        self.spun: list[float] = []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "_sleep", self.spin)

    def spin(self, cycles: int) -> None:
        self.spun.append(cycles / timing.SPIN_RATE)
        self.busy_until = self.now + self.spun[-1]

    def call(self, number: int) -> None:
        self.now += self.launches.pop(0)
        self.busy_until = max(self.busy_until, self.now) + 1e-3


class Event:
    def __init__(self, device: Device):
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.now, self.device.busy_until)

    def query(self) -> bool:
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


@pytest.mark.parametrize(
    ("launches", "spun", "milliseconds"),
    [([0.01], 1, 1.0), ([0.5, 0.01], 2, 1.0), ([0.5, 0.5, 0.01], 3, 1.0), ([0.5] * 4, 4, 381.0)],
)
def test_a_sample_that_the_host_fell_behind_is_taken_again(
    monkeypatch, launches, spun, milliseconds
):
    device = Device(monkeypatch, launches)
    found = timing._sample(device.call, 1, 0.01, torch.device("cuda"))
    assert device.spun == [pytest.approx(0.015 * 2**n) for n in range(spun)]
    assert found == pytest.approx(milliseconds)
