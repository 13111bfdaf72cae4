"""Which buckets are launched when: bookkeeping without tensors."""

from types import SimpleNamespace

import pytest

from ddp.base import DataParallel
from ddp.buckets import Bucket
from ddp.internals.step import Record
from ddp.schedule import Schedule


class Launches:
    """The loop of the base class over a schedule, without a network."""

    def __init__(self, *members: tuple[int, ...]):
        self.schedule = Schedule()
        self.gradients = SimpleNamespace(reduced=set())
        self.step = SimpleNamespace(record=Record())
        self.fails, self.sends = False, 0
        buckets = [Bucket(m, tuple(range(len(m))), len(m), 4 * len(m)) for m in members]
        self.schedule.adopt([i for m in members for i in m], buckets)
        self.schedule.begin_step()

    def launch(self, bucket: Bucket) -> None:
        if self.fails:
            raise KeyError
        if self.sends:
            DataParallel.count(self, collectives=self.sends, nbytes=bucket.nbytes)

    def launched(self, everything: bool = False) -> list[tuple[int, ...]]:
        before = len(self.step.record.launches)
        DataParallel.launch_buckets(self, everything)
        return [bucket.members for _, bucket in self.step.record.launches[before:]]


def test_a_bucket_waits_for_its_members_and_predecessors():
    s = Launches((3, 2), (1,), (0,))
    s.schedule.arrive(1)
    assert s.launched() == []
    s.schedule.arrive(2)
    assert s.launched() == []
    s.schedule.arrive(3)
    assert s.launched() == [(3, 2), (1,)]
    s.schedule.arrive(0)
    assert s.launched() == [(0,)]
    assert s.launched() == []


def test_the_rest_is_launched_in_the_same_order():
    s = Launches((2,), (1,), (0,))
    s.schedule.arrive(0)
    assert s.launched(everything=True) == [(2,), (1,), (0,)]


def test_a_launch_that_fails_is_not_counted():
    s = Launches((1,), (0,))
    s.schedule.arrive(1)
    s.fails = True
    with pytest.raises(KeyError):
        s.launched()
    assert s.schedule.launched == s.step.record.stats()["collectives"] == 0
    s.fails = False
    assert s.launched() == [(1,)]


def test_a_launch_may_count_what_it_sends():
    s = Launches((2, 1), (0,))
    s.schedule.arrive(1)
    s.schedule.arrive(2)
    s.sends = 2
    s.launched()
    s.sends = 0
    s.launched(everything=True)
    assert s.step.record.stats() == {"collectives": 2 + 1, "bytes": 12, "buckets": 0}


def test_a_second_round_launches_again_and_keeps_the_arrivals():
    s = Launches((1,), (0,))
    for i in (1, 0):
        s.schedule.arrive(i)
    assert s.launched() == [(1,), (0,)]
    s.schedule.begin_round()
    s.schedule.arrive(1)
    assert s.launched() == [(1,)]
    assert s.schedule.arrivals == {1: 2, 0: 1}
    s.schedule.begin_step()
    assert s.schedule.arrivals == {}
