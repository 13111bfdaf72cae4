"""How many collectives, when, of what size, and in which order: seen by a recording group."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Branches, branches_loss, small_buckets
from tests.support.on_ranks import on_ranks
from tests.support.recorder import Event, RecordingGroup, recording

WIDTH = 16
PLANNED = ["ddp_individual_v2", "ddp_bucketed"]
OVERLAPPING = ["ddp_individual", *PLANNED]


class Steps:
    """A wrapped network on a recording group, whose hooks and finishes are marked."""

    def __init__(self, group: RecordingGroup, context: Context, name: str, **options):
        self.context, self.group = context, group
        module = Branches(count=6, width=WIDTH).to(context.device)
        self.model = wrap(name, module, process_group=group, **options)
        for parameter_name, p in module.named_parameters():  # behind the wrapper's own hooks
            get_gradient_edge(p).node.register_hook(
                lambda *_gradients, n=parameter_name: group.mark("ready", n)
            )

    def run(self, order: list[int] | None = None) -> list[Event]:
        order = order or [0, 1, 2, 3, 4, 5]
        self.group.events.clear()
        branches_loss(0, lambda r: order)(self.model, self.context.rank).backward()
        self.group.mark("finish")
        self.model.finish_gradient_synchronization()
        return list(self.group.events)


def gradient_collectives(events: list[Event]) -> list[Event]:
    return [e for e in events if e.what.startswith("allreduce")]


def position(events: list[Event], what: str, last: bool = False) -> int:
    places = [i for i, e in enumerate(events) if e.what.startswith(what)]
    return places[-1 if last else 0]


def plan_of(model: nn.Module) -> list[tuple[int, ...]]:
    return [
        tuple(model.gradients.parameters[i].numel() for i in b.members)
        for b in model.schedule.buckets
    ]


@contextmanager
def steps_of(context: Context, name: str, **options) -> Iterator[Steps]:
    """Steps of a variant on a recording group."""
    with recording(context.group) as group:
        yield Steps(group, context, name, **options)


def several_buckets(name: str) -> dict:
    """Two layers and a half to a bucket."""
    return small_buckets(name, 2.5 * 4 * WIDTH * WIDTH / (1 << 20))


@on_ranks(2)
def test_ddp_reduces_each_gradient_after_backward(context: Context) -> None:
    with steps_of(context, "ddp") as steps:
        for _ in range(3):
            events = steps.run()
            calls = gradient_collectives(events)
            assert len(calls) == len(list(steps.model.parameters()))
            assert position(events, "allreduce") > position(events, "ready", last=True)
            assert all(len(c.numels) == 1 and c.op == "SUM" for c in calls)
            for i, e in enumerate(events):  # blocking: each is waited for before the next
                if e.what == "allreduce":
                    assert not e.asynchronous
                    assert events[i + 1].what == "wait"


@on_ranks(2)
def test_individual_launches_each_gradient_as_it_arrives(context: Context) -> None:
    with steps_of(context, "ddp_individual") as steps:
        for _ in range(3):
            events = steps.run()
            calls = gradient_collectives(events)
            assert len(calls) == len(list(steps.model.parameters()))
            assert all(len(c.numels) == 1 and c.asynchronous for c in calls)
        # In the order of readiness, each launched as its gradient arrives.
        before_finish = events[: position(events, "finish")]
        assert len(gradient_collectives(before_finish)) == len(calls)
        kinds = [e.what for e in before_finish if e.what in ("allreduce", "ready")]
        assert kinds == ["allreduce", "ready"] * len(calls)
        assert "wait" not in [e.what for e in before_finish]


@pytest.mark.parametrize("name", PLANNED)
@on_ranks(2)
def test_collectives_are_those_of_the_plan(context: Context, name: str) -> None:
    with steps_of(context, name, **several_buckets(name)) as steps:
        for _ in range(3):
            plan = plan_of(steps.model)
            events = steps.run()
            calls = gradient_collectives(events)
            assert all(c.asynchronous for c in calls)
            if name == "ddp_individual_v2":
                assert [c.numels for c in calls] == plan
            else:
                assert [c.numels for c in calls] == [(sum(sizes),) for sizes in plan]
        assert 2 <= len(calls) < len(list(steps.model.parameters())), "several, and batched"


@pytest.mark.parametrize("name", OVERLAPPING)
@on_ranks(2)
def test_launches_overlap_backward(context: Context, name: str) -> None:
    """The first launch precedes the last hook, and nothing is waited for before finish."""
    with steps_of(context, name, **several_buckets(name)) as steps:
        for _ in range(3):
            events = steps.run()
            hooks_end, finish = position(events, "ready", last=True), position(events, "finish")
            assert position(events, "allreduce") < hooks_end
            assert len(gradient_collectives(events[finish:])) <= 1
            waits = [i for i, e in enumerate(events) if e.what == "wait"]
            first_launch = position(events, "allreduce")
            assert not [i for i in waits if first_launch < i < finish], "blocks in backward"
            assert len([i for i in waits if i > finish]) >= len(gradient_collectives(events))


def forward_order_observed(context: Context, name: str) -> list:
    """Launches follow the observed order after the first step: rank 0's, on every rank."""
    with steps_of(context, name, **several_buckets(name)) as steps:
        r = context.rank
        backwards = [5, 4, 3, 2, 1, 0]  # registration suggests the other direction
        order = backwards if r == 0 else [(r + i) % 6 for i in range(6)]
        first, *later = (steps.run(order) for _ in range(3))
        names, buckets = steps.model.gradients.names, steps.model.schedule.buckets
        launched = [names[i] for b in buckets for i in b.members]
        if r == 0:
            assert launched == [e.detail for e in first if e.what == "ready"]
        sizes = [[(c.numels, c.op) for c in gradient_collectives(e)] for e in [first, *later]]
        return [launched, sizes]


@pytest.mark.parametrize("name", OVERLAPPING)
def test_one_order_on_every_rank(cpu_ranks, name):
    answers = cpu_ranks.run(3, forward_order_observed, name)
    assert answers[0] == answers[1] == answers[2]


@on_ranks(2)
def test_none_is_silent(context: Context) -> None:
    """Gradients stay this rank's own."""
    for reduce in ("mean", "sum"):
        with steps_of(context, "none", reduce=reduce) as steps:
            assert gradient_collectives(steps.run()) == []
            assert steps.model.stats()["collectives"] == steps.model.stats()["bytes"] == 0
            mine = [p.grad.clone() for p in steps.model.parameters()]
            loss = branches_loss(0, lambda r: [0, 1, 2, 3, 4, 5])(steps.model.module, context.rank)
            own = torch.autograd.grad(loss, list(steps.model.parameters()))
            for gradient, local in zip(mine, own, strict=True):
                torch.testing.assert_close(gradient, local)


@pytest.mark.parametrize("name", ["ddp", *OVERLAPPING, "torch_ddp"])
@on_ranks(2)
def test_stats_equal_what_was_recorded(context: Context, name: str) -> None:
    """Collectives and bytes are those recorded; under no_sync nothing travels."""
    with steps_of(context, name) as steps:
        for _ in range(3):
            calls = gradient_collectives(steps.run())
            calls = [c for c in calls if c.dtype == "torch.float32"]  # not agreements on integers
            stats = steps.model.stats()
            assert stats["collectives"] == len(calls), (stats, calls)
            assert stats["bytes"] == 4 * sum(c.numel for c in calls), (stats, calls)
            with steps.model.no_sync():
                steps.group.events.clear()
                branches_loss(1, lambda r: [0, 1, 2, 3, 4, 5])(steps.model, context.rank).backward()
                assert gradient_collectives(steps.group.events) == []
            steps.model.zero_grad()
            steps.run()


@pytest.mark.parametrize("name", ["ddp", *OVERLAPPING])
@on_ranks(2)
def test_launches_equal_what_was_recorded(context: Context, name: str) -> None:
    """`launches()` tells when each recorded collective left, and with whose gradients."""
    with steps_of(context, name, **several_buckets(name)) as steps:
        sizes = {n: p.nbytes for n, p in steps.model.module.named_parameters()}
        for _ in range(2):
            events = steps.run()
            launches = steps.model.launches()
            places = [i for i, e in enumerate(events) if e.what.startswith("allreduce")]
            assert len(launches) == len(places)
            assert sorted(n for launch in launches for n in launch.names) == sorted(sizes)
            for launch, place in zip(launches, places, strict=True):
                assert launch.nbytes == sum(sizes[n] for n in launch.names)
                marked = sum(e.what == "ready" for e in events[:place])
                # A gradient is marked behind the hook that launches its bucket.
                assert launch.ready == min(len(sizes), marked + (name != "ddp")), launch
