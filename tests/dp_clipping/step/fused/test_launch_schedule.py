"""When launches are made: `dp_clipping.step.fused.launch_schedule`."""

from types import SimpleNamespace

import pytest
import torch

from dp_clipping.step.fused import launch_schedule
from dp_clipping.step.fused.launch_schedule import LaunchSchedule

CPU = torch.device("cpu")


def sharding(sizes: dict[str, int], units: dict[str, int]) -> SimpleNamespace:
    """Of parameters by name: bytes of each, and the FSDP module that each is of."""
    members: dict[int, list[str]] = {}
    for name, unit in units.items():
        members.setdefault(unit, []).append(name)
    return SimpleNamespace(
        parts={name: SimpleNamespace(unit=unit) for name, unit in units.items()},
        units=members,
        unit_bytes={unit: sum(sizes[n] for n in names) for unit, names in members.items()},
        bytes=sum(sizes.values()),
    )


@pytest.fixture
def memory(monkeypatch):
    """What is allocated, as the test sets it."""
    level = [0]
    monkeypatch.setattr(launch_schedule, "allocated", lambda device: level[0])
    return level


def named(name: str) -> SimpleNamespace:
    return SimpleNamespace(parameter=name)


def test_nobody_is_met_without_shards():
    assert not LaunchSchedule(None, CPU).is_sync_point("a")


def test_ranks_meet_when_enough_units_are_complete(monkeypatch):
    monkeypatch.setattr(launch_schedule, "MEETINGS", 2)
    names = ("a", "b", "c", "d", "e")
    shards = sharding(dict.fromkeys(names, 10), {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2})
    mine = LaunchSchedule(shards, CPU)
    found = []
    for name in reversed(names):  # e: 10 of the 25 that are enough
        found.append(mine.is_sync_point(named(name)))
        if found[-1]:
            mine.reset_sync_point()
    assert found == [False, False, True, False, False]
    mine.begin()
    assert [mine.is_sync_point(named(name)) for name in names] == [False, False, False, True, True]


def test_a_large_unit_is_met_by_itself(monkeypatch):
    monkeypatch.setattr(launch_schedule, "UNIT_BYTES", 10)
    mine = LaunchSchedule(sharding({"a": 10, "b": 90}, {"a": 0, "b": 1}), CPU)
    assert mine.is_sync_point(named("a"))


def test_it_is_crowded_where_backward_has_freed_nothing(memory):
    mine = LaunchSchedule(None, CPU)
    mine.add(launch_schedule.PENDING_BYTES)
    assert not mine.is_crowded()
    mine.add(1)
    assert mine.is_crowded()
    mine.launched()
    assert not mine.is_crowded()


def test_half_of_what_backward_has_freed_may_wait(memory):
    memory[0] = 10 * launch_schedule.PENDING_BYTES
    mine = LaunchSchedule(None, CPU)
    memory[0] = 6 * launch_schedule.PENDING_BYTES  # freed: 4
    mine.add(2 * launch_schedule.PENDING_BYTES)
    assert not mine.is_crowded()  # 2 are left, 1 of them is granted
    mine.add(launch_schedule.PENDING_BYTES)
    assert not mine.is_crowded()
    mine.add(launch_schedule.PENDING_BYTES)  # nothing is left
    assert mine.is_crowded()


def test_never_more_than_the_most(memory):
    memory[0] = 1000 * launch_schedule.PENDING_BYTES
    mine = LaunchSchedule(None, CPU)
    memory[0] = 0
    mine.add(launch_schedule.MOST_PENDING_BYTES + 1)
    assert mine.is_crowded()


def test_what_the_forward_has_left(memory):
    mine = LaunchSchedule(None, CPU)
    memory[0] = 123
    assert mine.saved == 123
