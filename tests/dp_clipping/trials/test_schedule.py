"""Calls 1, 2, 4, 8, ... are checked, and those that are larger than all before."""

from dp_clipping.trials.schedule import SAMPLED, Schedule


def test_which_batch_is_due_is_known_before_it_comes():
    schedule, due = Schedule(), []
    for size in (4, 4, 4, 4, 4, 9, 9, 9):
        due.append(schedule.is_due(size))
        assert schedule.is_due(size) == due[-1], "nothing is counted"
        assert schedule.next_is_due(size) == due[-1]
        if due[-1]:
            schedule.next_check(size)
            schedule.passed(size)
    assert due == [True, True, False, True, False, True, False, True]


def test_powers_of_two_without_sizes():
    schedule = Schedule()
    assert [n for n in range(1, 20) if schedule.next_is_due()] == [1, 2, 4, 8, 16]


def test_what_is_not_counted_stays_due():
    schedule = Schedule()
    assert schedule.is_due()
    assert schedule.is_due()
    schedule.skip(5)
    assert [n for n in range(6, 20) if schedule.next_is_due()] == [8, 16]


def test_the_largest_batch_so_far_is_checked_whole():
    schedule, found = Schedule(), []
    for size in (4, 4, 8, 6, 9):
        found.append(schedule.next_check(size))
        schedule.passed(size)
    assert found == [(0, True), (1, False), (2, True), (3, False), (4, True)]


def test_a_check_that_has_not_passed_is_made_again():
    schedule = Schedule()
    schedule.skip(8)
    assert not schedule.next_is_due(4)
    schedule.is_open = True
    assert schedule.next_is_due(4)
    assert schedule.next_check(4) == (0, True)
    schedule.passed(4)
    assert not schedule.next_is_due(4)
    assert [schedule.is_due(size) for size in (7, 8)] == [False, True]
    schedule.every_larger = True
    assert [schedule.is_due(size) for size in (4, 5)] == [False, True]


def test_levels():
    calls = 200 * SAMPLED
    due = {n for n in range(calls) if (schedule := at(n, "sampled")).is_due() and schedule.is_due()}
    powers = {2**k - 1 for k in range(20) if 2**k - 1 < calls}
    assert powers < due
    assert 100 < len(due - powers) < 300
    assert not any(at(n, "off").is_due(10**6) for n in range(100))


def at(count: int, level: str) -> Schedule:
    """Returns a schedule on which that many calls have been."""
    schedule = Schedule(level)
    schedule.skip(count)
    return schedule
