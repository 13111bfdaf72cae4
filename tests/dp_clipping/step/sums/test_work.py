"""When norms, coefficients and sums are formed: what waits, what is let go of, and in which order.

Work that notes what it is asked for stands in for kernels. Parameters have one letter, and
a backward reaches them from the last one to the first.
"""

import weakref
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.distributed.norm_reduce import NormReducer
from dp_clipping.kernels.convolution.factors import take_norms
from dp_clipping.layers.recorder import DENSE, FACTORS, LINEAR
from dp_clipping.profiling.profile import Timer
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums import clipped_sums as sums
from dp_clipping.step.sums import fused, sync_points, work
from dp_clipping.step.sums.backward_state import Kept
from dp_clipping.step.sums.plain import Uses
from dp_clipping.step.sums.work import Work
from tests.dp_clipping.conftest import (
    clipped_sums,
    private,
    trained,
)
from tests.support import zoo
from tests.support.turns import in_turn

BATCH, SHAPE, SIZE = 2, (2, 4), 8
EACH = BATCH * SIZE * 4  # bytes of what one parameter's use leaves
SUM = SIZE * 4  # and of its sum
ONE_MODULE = ("abcd",)


class Noting(Work):
    """Work that notes its calls, as the letters of the parameters that each is for."""

    def __init__(self, is_fused: bool, late: str, *args: Any) -> None:
        self.fused, self.late = is_fused, late
        self.events: list[tuple[str, str]] = []
        self.unnormed: list = []
        super().__init__(*args)

    def note(self, what: str, records: list) -> None:
        self.events.append((what, "".join(record.name for record in records)))

    def take_norms(self, lefts: list, everything: bool) -> None:
        records = [left.records[0] for left in lefts]
        self.unnormed += [record for record in records if record.name in self.late]
        records = [record for record in records if record not in self.unnormed]
        if everything:
            records, self.unnormed = records + self.unnormed, []
        if records:
            self.note("norms", records)
            self.norms.table.add_rows(records, torch.ones(len(records), BATCH))
        for left in lefts:
            if self.two_passes:
                self.recomputed.append(left.records[0])
            else:
                self.keep([(left.records[0], left.tensors[0])])

    def set_coefficients(self, groups: list[int]) -> BatchNorms:
        self.events.append(("clip", "".join(map(str, groups))))
        return BatchNorms(torch.ones(BATCH), torch.ones(1, BATCH))

    def summands(self, lefts: list) -> tuple[list, list]:
        new = [left for left in lefts if left.records[0] not in self.taken]
        summands = [(left.tensors[0], left.tensors, left.versions) for left in new]
        return [left.records[0] for left in new], summands

    def sums(self, records: list, values: list) -> list[Tensor]:
        self.note("sums", records)
        return [torch.zeros(SHAPE) for _ in records]


def sharding_of(records: list, modules: tuple[str, ...]) -> SimpleNamespace:
    """FSDP modules, each given as the letters of its parameters."""
    named = {record.name: record.parameter for record in records}
    unit_of = {name: unit for unit, names in enumerate(modules) for name in names}
    return SimpleNamespace(
        parts={named[name]: SimpleNamespace(unit=unit) for name, unit in unit_of.items()},
        units={unit: [named[name] for name in names] for unit, names in enumerate(modules)},
        unit_bytes={unit: SUM * len(names) for unit, names in enumerate(modules)},
        bytes=SUM * len(records),
    )


class Shards:
    """Sums of a sharded model, which leave when they are told to."""

    deferred = False
    events: list

    def launch_ready(self) -> None:
        self.events.append(("send", ""))


class Step:
    """One step on four parameters.

    Args:
        groups: the clipping group of each parameter; several are clipped as they are complete.
        modules: parameters of each FSDP module; None: the network is not sharded.
        stay: parameters whose factors are kept for their sums in any case.
        late: parameters whose norms wait for a launch with others, until all are asked for.
        is_fused, two_passes, compiled: of the mode.
    """

    def __init__(
        self, *, groups: str = "0000", modules: tuple[str, ...] | None = None, stay: str = "",
        late: str = "", is_fused: bool = True, two_passes: bool = False, compiled: bool = False,
        saved: int = 0,
    ) -> None:  # fmt: skip
        self.records = {
            name: trained(Parameter(torch.zeros(SHAPE)), name, int(group))
            for name, group in zip("abcd", groups, strict=True)
        }
        everyone = list(self.records.values())
        members = [[r for r in everyone if r.group == k] for k in sorted({*map(int, groups)})]
        plans = SimpleNamespace(
            make=lambda: None, runs_twice=False, gradient_bytes={}, choices={},
            kept_as_they_are={self.records[name] for name in stay}, at_first=-saved,
        )  # fmt: skip
        capture = SimpleNamespace(trained=everyone, members=members, trigger=torch.zeros(()))
        policy = SimpleNamespace(two_passes=two_passes, dense_always=False)
        context = SimpleNamespace(
            capture=capture, policy=policy, reducer=NormReducer(), timer=Timer(None),
            sharding=None if modules is None else sharding_of(everyone, modules),
            departures=None, sums=None if modules is None else Shards(), streams=len(members) > 1,
        )  # fmt: skip
        self.work = Noting(is_fused, late, context, BATCH, Kept(), Uses, None, plans, compiled)
        self.events = self.work.events
        if modules is not None:
            context.sums.events = self.events
        self.work.begin(torch.zeros(BATCH), torch.ones(len(members)), list)

    def take(self, names: str, kind: str = DENSE) -> list[weakref.ref]:
        """Lets layers leave something in this order; returns what shows whether it is there."""
        held = []
        for name in names:
            left = torch.ones(BATCH, *SHAPE)
            held.append(weakref.ref(left))
            self.work.take(kind, (self.records[name],), None, (left,))
        return held

    def backward(self, names: str, kind: str = DENSE) -> list[weakref.ref]:
        self.work.seen.clear()
        points = self.work.points
        with nullcontext() if points is None else points.in_backward():
            return self.take(names, kind)

    def end(self) -> list[tuple[str, str]]:
        self.work.clip()
        self.work.begin_sums()
        self.work.end_sums()
        return self.events


@pytest.fixture
def little(monkeypatch):
    """Two uses and their sums may wait, and backward has freed nothing."""
    monkeypatch.setattr(work, "PENDING_BYTES", 2 * EACH)
    monkeypatch.setattr(work, "allocated", lambda device: 0)


def arrivals_before_a_launch(step: Step) -> int:
    number = 0
    while not step.events:
        step.backward("d")
        number += 1
    return number


# Without shards


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_step_that_fits_has_one_launch_of_each_kind(is_fused):
    step = Step(is_fused=is_fused)
    step.backward("dcba")
    assert step.events == []
    assert step.end() == [("norms", "dcba"), ("clip", "0"), ("sums", "dcba")]


def test_more_than_may_wait_is_normed_as_it_arrives(little):
    step = Step(two_passes=True)
    held = step.take("dc")
    assert step.events == []
    held += step.take("b")
    assert step.events == [("norms", "dcb")]
    assert not any(one() is not None for one in held), "no sum needs it, so it is let go of"
    step.backward("ad")  # so much fits again
    assert step.events == [("norms", "dcb")]
    step.work.clip()
    assert step.events == [("norms", "dcb"), ("norms", "ad"), ("clip", "0")]


@pytest.mark.parametrize(("saved", "arrivals"), [(3, 2), (0, 9), (1000, 9)])
def test_no_more_waits_than_a_share_of_what_the_forward_saved(monkeypatch, saved, arrivals):
    """A small network's ordinary step holds little; 0: it is not known. In units of one use."""
    monkeypatch.setattr(work, "PENDING_BYTES", 8 * EACH)
    monkeypatch.setattr(work, "PENDING_SHARE", 3)
    monkeypatch.setattr(work, "LEAST_PENDING_BYTES", 0)
    monkeypatch.setattr(work, "allocated", lambda device: 0)
    step = Step(two_passes=True, saved=saved * EACH)
    assert arrivals_before_a_launch(step) == arrivals


def test_what_is_kept_for_its_sum_waits_in_any_case(little):
    """To launch it would free nothing: G that is there, and factors that the plan keeps."""
    step = Step(stay="dcba")
    step.take("dcba", LINEAR)
    assert step.events == []
    step = Step()
    step.take("dcba")
    assert step.events == []
    step = Step(stay="db")
    step.take("dcba", LINEAR)
    assert step.events == []
    step.work.pending = 3 * EACH  # of layers that are not here
    step.work._make_room()
    assert step.events == [("norms", "ca")]
    assert step.end()[1:] == [("norms", "db"), ("clip", "0"), ("sums", "dcb"), ("sums", "a")]


def test_factors_on_kernels_wait_while_they_fit(little):
    """They are packed then, or let go of: nothing else would hold them."""
    step = Step()
    step.take("d", FACTORS)
    assert step.events == []
    step.take("c", FACTORS)  # packing takes as much again as they hold
    assert step.events == [("norms", "dc")]
    assert step.work.pending == 0


@pytest.mark.parametrize(
    ("freed", "arrivals"),
    [(0, 3), (4, 4), (4.75, 4), (1000, 9)],
    ids=["nothing", "half of it", "half of what is left of it", "never more than the most"],
)
def test_half_of_what_backward_has_freed_may_wait(monkeypatch, freed, arrivals):
    """In units of one use. Two may wait in any case, and eight at most."""
    monkeypatch.setattr(work, "PENDING_BYTES", 2 * EACH)
    monkeypatch.setattr(work, "MOST_PENDING_BYTES", 8 * EACH)
    levels = iter([1000 * EACH])  # as backward begins
    monkeypatch.setattr(work, "allocated", lambda device: next(levels, (1000 - freed) * EACH))
    step = Step(two_passes=True)
    assert arrivals_before_a_launch(step) == arrivals


@pytest.mark.parametrize(
    ("room", "sums"),
    [(SUM, ["d", "c", "b", "a"]), (3 * SUM, ["dc", "ba"]), (4 * SUM, ["dcb", "a"])],
    ids=["half of one", "one", "two"],
)
def test_sums_are_formed_as_memory_allows(little, monkeypatch, room, sums):
    """A sum counts twice, with what its launch adds up. The last one may exceed the room.

    What sums are formed of is freed with them.
    """
    monkeypatch.setattr(work, "PENDING_BYTES", room)
    step = Step(stay="abcd")
    held = step.take("dcba", LINEAR)
    seen = []
    step.work._accumulate = lambda sums: seen.append(
        (len(list(sums)), sum(one() is not None for one in held))
    )
    assert [names for what, names in step.end() if what == "sums"] == sums
    assert [count for count, _ in seen] == [len(names) for names in sums]
    assert not any(one() is not None for one in held)


def test_in_compiled_code_sums_that_take_more_than_they_free_come_last():
    step = Step(compiled=True)
    step.records["d"].shape = torch.Size((10**6,))
    step.take("dcba")
    assert step.end()[-1] == ("sums", "cbad")


# Groups that are clipped one by one


def test_groups_wait_for_each_other_while_they_fit():
    step = Step(groups="0011")
    step.backward("dcba")
    assert step.end() == [("norms", "dcba"), ("clip", "01"), ("sums", "dcba")]


def test_groups_are_summed_as_they_are_complete_where_memory_is_short(little):
    step = Step(groups="0011")
    step.backward("dcb")
    assert step.events == [("norms", "dc"), ("clip", "1"), ("sums", "dc")]
    step.backward("a")
    assert step.events[3:] == [("norms", "ba"), ("clip", "0"), ("sums", "ba")]
    assert step.end()[6:] == [("clip", "01")]  # for the norms of all, which are returned


def test_groups_are_complete_with_norms_that_wait_for_a_common_launch(little):
    step = Step(groups="0011", late="c")
    step.backward("dc")
    assert step.events == [("norms", "dc"), ("clip", "1"), ("sums", "dc")]


def test_a_group_that_is_not_complete_waits(little):
    step = Step(groups="0101")
    step.backward("dc")
    assert step.events == [("norms", "dc")]
    step.backward("ba")
    assert step.events[1:] == [("norms", "ba"), ("clip", "01"), ("sums", "dcba")]


# A second backward


def test_sums_are_of_what_a_second_backward_brings():
    step = Step(two_passes=True)
    step.backward("dcba")
    step.work.clip()
    step.work.begin_sums()
    assert [record.name for record in step.work.recomputed] == [*"dcba"]
    step.backward("dcba")
    step.work.end_sums()
    assert step.events == [("norms", "dcba"), ("clip", "0"), ("sums", "dcba")]


def test_a_second_backward_forms_sums_early_where_memory_is_short(little):
    step = Step(two_passes=True)
    step.backward("dcba")
    step.work.clip()
    step.work.begin_sums()
    before = len(step.events)
    held = step.backward("dc")
    assert step.events[before:] == [("sums", "dc")]
    assert not any(one() is not None for one in held)
    step.backward("ba")
    step.work.end_sums()
    assert [names for what, names in step.events if what == "sums"] == ["dc", "ba"]


def test_a_second_backward_brings_nothing_for_sums_that_are_there():
    step = Step()
    step.backward("dc")
    step.work.clip()
    step.work.begin_sums()
    step.backward("dcba")  # d and c have what their sums need from the first one
    step.work.end_sums()
    assert [names for what, names in step.events if what == "sums"] == ["ba", "dc"]


# Sync points of a sharded model


@pytest.mark.parametrize(
    ("modules", "meetings", "sent_with"),
    [
        (("ab", "cd"), 8, "ca"),  # one module each time
        (("ab", "cd"), 1, "a"),  # not before all of them are there
        (("a", "b", "c", "d"), 2, "ca"),  # half of the bytes
        (("ac", "bd"), 8, "ba"),  # only what is complete
    ],
)
def test_ranks_meet_where_enough_modules_are_complete(monkeypatch, modules, meetings, sent_with):
    """Whatever a rank's batch and memory are; sums leave there, and once more at the end."""
    monkeypatch.setattr(sync_points, "MEETINGS", meetings)
    step = Step(groups="0123", modules=modules)
    found = []
    with step.work.points.in_backward():
        for name in "dcba":
            before = len(step.events)
            step.take(name)
            found += [name for event in step.events[before:] if event[0] == "send"]
    assert "".join(found) == sent_with
    assert step.events[-1] == ("send", "")


def test_at_a_sync_point_complete_groups_are_summed_and_sent():
    step = Step(groups="0011", modules=("ab", "cd"))
    with step.work.points.in_backward():
        step.take("dc")
        assert step.events == [("norms", "dc"), ("clip", "1"), ("sums", "dc"), ("send", "")]
        assert step.work.points.defers_sums
    assert not step.work.points.defers_sums


def test_flat_clipping_sends_nothing_in_backward():
    step = Step(modules=("ab", "cd"))
    with step.work.points.in_backward():
        step.take("dcba")
        assert step.events == []
    assert step.end()[1:] == [("norms", "dcba"), ("clip", "0"), ("sums", "dcba")]


def test_memory_forms_no_sums_that_wait_for_a_sync_point(little):
    """Sums leave at sync points, so that forming them early would free nothing."""
    step = Step(modules=ONE_MODULE, groups="0011")
    with step.work.points.in_backward():
        assert step.work.bytes_of((step.records["a"],)) == 0
    assert step.work.bytes_of((step.records["a"],)) == SUM


def test_what_waits_for_a_sync_point_may_take_as_much_as_without_shards(little):
    step = Step(modules=ONE_MODULE, two_passes=True)
    step.take("dc")
    assert step.events == []
    step.take("b")
    assert step.events == [("norms", "dcb")]


@pytest.mark.parametrize("arrival", ["dcba", "cdab"])
def test_layerwise_norms_leave_at_sync_points_in_one_order(arrival):
    """Also with flat clipping, and in the order of the network, whatever arrives first."""
    step, sent = Step(modules=("ab", "cd")), []
    step.work.norms._partial = SimpleNamespace(add=lambda record: sent.append(record.name))
    with step.work.points.in_backward():
        step.take(arrival[:2])
        assert sent == ["d", "c"]
        assert step.events == [("norms", arrival[:2]), ("send", "")]
        step.take(arrival[2:])
    assert sent == ["d", "c", "b", "a"]


# Launches of kernels


class Launches:
    """Counts the launches of a step on kernels, and the layers that each serves."""

    NAMES = (
        "gradients_and_squares", "gram_squares", "norm_layer_gradients",
        "squares_of_vectors", "squares_of_tiles", "clip_coefficients", "weighted_products",
        "weighted_sums", "token_sums",
    )  # fmt: skip

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        owners = [(sums if name.startswith("weighted") else fused, name) for name in self.NAMES]
        owners.append((sums.TokenSums, "weighted_sums"))
        self.patches = [patch.object(*one, self.counted(*one)) for one in owners]

    def counted(self, owner: Any, name: str):
        right = getattr(owner, name)

        def launch(*args, **kwargs):
            self.count[name] += 1
            return right(*args, **kwargs)

        return launch

    def __enter__(self) -> Counter[str]:
        for one in self.patches:
            one.start()
        return self.count

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()


def blocks(count: int) -> nn.Module:
    layers = [layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]
    return zoo.seeded(lambda: nn.Sequential(*layers))


def bags(count: int) -> nn.Module:
    """Bags of the same ids, side by side."""
    return zoo.Net(
        lambda net, ids: sum([bag(ids) for bag in net.bags]),
        bags=nn.ModuleList(nn.EmbeddingBag(9, 3) for _ in range(count)),
    )


def check_launches(kind: str, mode: str, clipping: str, expected: dict[str, int]) -> None:
    for count in (2, 5):  # launches serve all layers
        options = {"policy": {"norm_algorithm": "input_length", "tile_size": 16}}
        network = blocks(count) if kind == "blocks" else bags(count)
        model = private(network, mode, clipping=clipping, **options)
        model.skip_checks()
        if kind == "blocks":
            batch = torch.randn(3, 6, 8), torch.randn(3, 6, 8)
        else:
            batch = torch.randint(9, (3, 6)), torch.randn(3, 3)
        clipped_sums(model, batch)
        with Launches() as launches:
            clipped_sums(model, batch)
        assert launches == Counter(expected)


ONE_OF_EACH = {"gradients_and_squares": 1, "norm_layer_gradients": 1, "squares_of_vectors": 1,
               "squares_of_tiles": 1, "clip_coefficients": 1, "weighted_products": 1,
               "weighted_sums": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "clipping"), in_turn(["flash_bookkeeping", "flash"], ["flat", "per_layer"])
)
def test_a_launch_serves_all_layers(interpreter, mode, clipping):
    interpreter.run(check_launches, "blocks", mode, clipping, ONE_OF_EACH)
    expected = {"token_sums": 1, "clip_coefficients": 1, "weighted_sums": 1}
    interpreter.run(check_launches, "bags", mode, clipping, expected)


def check_large_pictures() -> None:
    """Without room for what waits pictures are normed as they arrive, else together."""
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 8)
    model = private(zoo.seeded(lambda: nn.Sequential(*layers)), "flash_bookkeeping")
    model.skip_checks()
    batch = torch.randn(3, 2, 4, 4), torch.randn(3, 8)
    together = clipped_sums(model, batch)
    with patch.object(work, "PENDING_BYTES", 0), patch.object(work, "MOST_PENDING_BYTES", 0):
        at_once = clipped_sums(model, batch)
    torch.testing.assert_close(at_once, together)


def test_pictures_without_room_are_normed_as_they_arrive(interpreter):
    interpreter.run(check_large_pictures)


def check_pieces() -> None:
    """Half of what backward has freed may be packed at a time."""
    network = zoo.seeded(lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten()))
    model = private(network, "flash_bookkeeping")
    model.skip_checks()
    most = []

    def taken(uses: Any, keep: bool, bytes_at_a_time: int) -> Any:
        most.append(bytes_at_a_time)
        return take_norms(uses, keep, bytes_at_a_time)

    levels = iter([0])  # when the backward begins; at its end less is in use
    with (
        patch.object(work, "allocated", lambda device: next(levels, -2 << 27)),
        patch.object(fused, "take_norms", taken),
    ):
        clipped_sums(model, (torch.randn(3, 4, 4, 4), torch.randn(3, 32)))
    assert most == [1 << 27]


def test_pieces_grow_as_backward_frees_memory(interpreter):
    interpreter.run(check_pieces)
