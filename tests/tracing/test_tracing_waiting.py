"""Waiting for a slow rank is told from communication, in figures and picture."""

from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from ddp_by_hand.tracing import Trace, load_trace, overlap, phase, profile, write_summary
from ddp_by_hand.tracing.timeline import WAITING, timeline_figure
from ddp_by_hand.tracing.waiting import share_clock, tell_waiting

CLOCK = ("a host", 0)


def trace(rank, computation, calls, clock=CLOCK, group_sizes=frozenset({2})):
    """One step from 0 to 100 ms."""
    return Trace(
        rank=rank, basis="made up", computation=computation, communication=sorted(calls),
        phases={"forward_pass": [(0.0, 1.0)], "optimizer_step": [(99e3, 100e3)]},
        phase_basis="made up", span=(0.0, 100e3), layers={},
        collectives={"all_reduce": sorted(calls)}, clock=clock, group_sizes=group_sizes,
    )  # fmt: skip


def pair(**changes):
    """Rank 1 computes 20 ms longer, so rank 0 waits; data takes 10 ms. Then both are in time."""
    return [
        trace(0, [(0.0, 40e3)], [(40e3, 70e3), (80e3, 85e3)], **changes),
        trace(1, [(0.0, 60e3)], [(60e3, 70e3), (80e3, 85e3)], **changes),
    ]


def test_a_late_peer_is_waiting_and_what_computation_hides_costs_nothing():
    early, late = (overlap(one) for one in tell_waiting(pair()))
    assert (early.waiting, early.exposed, early.communication) == (20e3, 15e3, 15e3)
    assert (late.waiting, late.exposed, late.communication) == (0, 15e3, 15e3)
    for one in (early, late):
        assert one.computation + one.exposed + one.waiting + one.idle == one.span
    assert overlap(tell_waiting(pair())[0]).per_step().waiting == 20e3
    early, late = pair()
    early = replace(early, computation=[(0.0, 55e3)])
    assert overlap(tell_waiting([early, late])[0]).waiting == 5e3


@pytest.mark.parametrize(
    "changes",
    [
        {"clock": None},
        {"group_sizes": frozenset({2, 4})},  # collectives of other groups than all ranks
    ],
)
def test_what_cannot_be_told_stays_communication(changes):
    traces = pair(**changes)
    assert not share_clock(traces)
    assert tell_waiting(traces) == traces
    assert overlap(traces[0]).exposed == 35e3


def test_other_hosts_and_collectives_that_do_not_match_are_left_alone():
    early, late = pair()
    late = replace(late, clock=("another host", 0))
    assert tell_waiting([early, late]) == [early, late]
    assert tell_waiting([early]) == [early]  # the other ranks' traces are elsewhere
    early, late = pair()
    more = replace(
        late, collectives={"all_reduce": [*late.collectives["all_reduce"], (90e3, 91e3)]}
    )
    assert overlap(tell_waiting([early, more])[0]).waiting == 0
    before = replace(early, collectives={"all_reduce": [(40e3, 45e3), (80e3, 85e3)]})
    assert overlap(tell_waiting([before, late])[0]).waiting == 0  # it ended before the other began


def test_the_picture_draws_it_and_puts_lanes_on_one_clock():
    traces = tell_waiting(pair())
    late = replace(traces[1], span=(10e3, 100e3), phases={"forward_pass": [(10e3, 11e3)]})
    figure = timeline_figure({"ddp": [traces[0], late]}, "title")
    axes = figure.axes[0]
    drawn = [
        path.get_extents()
        for collection in axes.collections
        if to_hex(collection.get_facecolor()[0]).upper() == WAITING
        for path in collection.get_paths()
    ]
    assert [(box.x0, box.x1) for box in drawn] == [(40, 60)]
    texts = [text.get_text() for text in axes.texts]
    assert "waiting 10.0 ms" in texts
    assert any("one clock" in text.get_text() for text in figure.texts)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "waiting for a slower rank" in labels


def test_the_summary_has_it_or_says_why_not(tmp_path):
    path = tmp_path / "summary.txt"
    write_summary(path, {}, tell_waiting(pair()), [], [])
    assert "20.000" in path.read_text()
    write_summary(path, {}, pair(clock=None), [], [])
    assert "waiting: not known" in path.read_text()


def test_a_trace_says_whose_clock_it_has(tmp_path):
    clocks = set()
    for name in ("a.json", "b.json"):
        with profile(tmp_path / name, device_type="cpu", memory=False), phase("forward_pass"):
            __import__("torch").ones(2) + 1
        clocks.add(load_trace(tmp_path / name).clock)
    assert len(clocks) == 1
    assert None not in clocks


def test_a_trace_that_the_profiler_could_not_write_is_an_error(tmp_path, monkeypatch):
    """Its writer says nothing of a full disk."""

    def full(self, path):
        open(f"{path}.tmp", "w").close()

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", full)
    recording = profile(tmp_path / "trace.json", device_type="cpu", memory=False)
    with pytest.raises(OSError, match=r"could not be written.*trace\.json"), recording:
        pass
    assert list(tmp_path.iterdir()) == []
