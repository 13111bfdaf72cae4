"""Which buckets are launched when: bookkeeping without tensors."""

from ddp.buckets import Bucket
from ddp.schedule import Schedule


def schedule(*members: tuple[int, ...]) -> Schedule:
    new = Schedule()
    buckets = [Bucket(m, tuple(range(len(m))), len(m), 4 * len(m)) for m in members]
    new.adopt([i for m in members for i in m], buckets)
    new.begin_step()
    return new


def launched(s: Schedule, everything: bool = False) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in s.to_launch(everything, lambda: True)]


def test_a_bucket_waits_for_its_members_and_predecessors():
    s = schedule((3, 2), (1,), (0,))
    s.arrive(1)
    assert launched(s) == []
    s.arrive(2)
    assert launched(s) == []
    s.arrive(3)
    assert launched(s) == [(3, 2), (1,)]
    s.arrive(0)
    assert launched(s) == [(0,)]
    assert launched(s) == []


def test_the_rest_is_launched_in_the_same_order():
    s = schedule((2,), (1,), (0,))
    s.arrive(0)
    assert launched(s, everything=True) == [(2,), (1,), (0,)]


def test_a_launch_that_fails_is_not_counted():
    s = schedule((1,), (0,))
    s.arrive(1)
    try:
        for _ in s.to_launch(False, lambda: True):
            raise KeyError
    except KeyError:
        assert s.launched == 0
    assert launched(s) == [(1,)]


def test_a_second_round_launches_again_and_keeps_the_arrivals():
    s = schedule((1,), (0,))
    for i in (1, 0):
        s.arrive(i)
    assert launched(s) == [(1,), (0,)]
    s.begin_round()
    s.arrive(1)
    assert launched(s) == [(1,)]
    assert s.arrivals == {1: 2, 0: 1}
    s.begin_step()
    assert s.arrivals == {}
