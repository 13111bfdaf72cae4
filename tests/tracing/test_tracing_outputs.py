"""The picture, the summary, and the profiler that feeds them."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex

from ddp_by_hand.tracing import (
    OperatorRow,
    Trace,
    disturbance,
    draw_timeline,
    load_trace,
    overlap,
    phase,
    profile,
    representative_step,
    slowest_operators,
    write_summary,
)
from ddp_by_hand.tracing.gpu_rules import Work
from ddp_by_hand.tracing.timeline import COMPUTATION, EXPOSED, HIDDEN, timeline_figure

FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name):
    return load_trace(FIXTURES / f"gloo_{name}.json")


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def made_up_trace(rank=0, lengths=(100.0, 300.0, 200.0), exposed=10.0):
    """Steps of given lengths; in each, computation then exposed communication then computation."""
    computation, communication, phases = [], [], {"forward_pass": [], "optimizer_step": []}
    start = 0.0
    for length in lengths:
        middle, end = start + length / 2, start + length
        computation += [(start, middle), (middle + exposed, end)]
        communication += [(middle - exposed, middle + exposed)]
        phases["forward_pass"].append((start, start + 5))
        phases["optimizer_step"].append((end - 5, end))
        start = end
    return Trace(
        rank, "GPU kernels", computation, communication, phases, "x", (0.0, sum(lengths)), {}
    )


def test_one_panel_and_three_stacked(tmp_path):
    synchronous, overlapped = fixture("synchronous"), fixture("overlapped")
    draw_timeline({"ddp": [synchronous]}, tmp_path / "one.png", title="one")
    three = {"ddp": [synchronous, synchronous], "v2": [overlapped], "bucketed": [overlapped]}
    draw_timeline(three, tmp_path / "three.png")
    width, height = png_size(tmp_path / "one.png")
    assert width >= 1800
    assert png_size(tmp_path / "three.png")[0] == width
    assert png_size(tmp_path / "three.png")[1] > 1.5 * height
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "three.png"]


def drawn_ms(axes, colour):
    """How many milliseconds of a colour the panel holds, lanes added."""
    bars = [c for c in axes.collections if to_hex(c.get_facecolor()[0]) == colour.lower()]
    paths = [path for bar in bars for path in bar.get_paths()]
    return sum(path.get_extents().width for path in paths)


def texts(axes):
    return " | ".join(text.get_text() for text in axes.texts)


def test_bars_are_as_long_as_the_numbers_say():
    trace = fixture("overlapped")
    (window,) = representative_step([trace])
    step = overlap(trace, window)
    axes = timeline_figure({"v2": [trace]}, "title").axes[0]
    for colour, microseconds in [
        (COMPUTATION, step.computation),
        (HIDDEN, step.overlapped),
        (EXPOSED, step.exposed),
    ]:
        assert drawn_ms(axes, colour) == pytest.approx(microseconds / 1000, rel=1e-4)
    assert f"exposed {step.exposed / 1000:.1f} ms" in texts(axes)
    assert f"{step.overlap_fraction:.0%} hidden" in texts(axes)
    trace = fixture("synchronous")
    (window,) = representative_step([trace])
    axes = timeline_figure({"ddp": [trace]}, "title").axes[0]
    ends = {end for _, end in trace.phases["backward_pass"] if window[0] < end <= window[1]}
    (marked,) = [line.get_xdata()[0] for line in axes.lines]
    assert marked == pytest.approx((ends.pop() - window[0]) / 1000)


def test_the_parts_of_a_private_backward_are_named_in_its_place():
    trace = made_up_trace(lengths=(1000.0,))
    phases = {"backward_pass": [(5, 900)], "norm_pass": [(5, 400)], "weighted_sum": [(410, 900)]}
    axes = timeline_figure({"ddp": [replace(trace, phases=trace.phases | phases)]}, "t").axes[0]
    assert "norms | sums" in texts(axes)
    del phases["norm_pass"], phases["weighted_sum"]
    axes = timeline_figure({"ddp": [replace(trace, phases=trace.phases | phases)]}, "t").axes[0]
    assert "backward | " in texts(axes)


def test_step_of_median_length_is_drawn_on_every_rank():
    fast, slow = made_up_trace(0), made_up_trace(1, lengths=(110.0, 310.0, 230.0))
    assert representative_step([fast, slow]) == [(400, 600), (420, 650)]
    cut = made_up_trace(1, lengths=(110.0,))
    assert representative_step([fast, cut]) == [(0, 100), (0, 110)]
    sends = replace(fast, communication=[(250, 260)])  # in one step of several
    assert representative_step([sends]) == [(100, 400)]


def test_panels_share_an_axis_and_four_of_more_ranks_are_shown():
    short, long = made_up_trace(lengths=(1000.0,)), made_up_trace(lengths=(5000.0,))
    axes = timeline_figure({"a": [short], "b": [long]}, "title").axes
    assert axes[0].get_xlim() == axes[1].get_xlim()
    assert axes[0].get_xlim()[0] == 0
    assert axes[0].get_xlim()[1] == pytest.approx(5, rel=0.02)
    axes = timeline_figure({"ddp": [made_up_trace(rank) for rank in range(6)]}, "title").axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert "first 4 of 6 ranks" in texts(axes)


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no trace of ddp"):
        draw_timeline({"ddp": []}, tmp_path / "x.png")
    with pytest.raises(ValueError, match="any implementation"):
        draw_timeline({}, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_summary_holds_the_figures(tmp_path):
    traces = [fixture("overlapped")]
    rows = [OperatorRow("aten::mm", 45, 104_000.0, 103_364.8), OperatorRow("x" * 80, 1, 2.0, 1.0)]
    path = tmp_path / "ddp_summary.txt"
    configuration = {"implementation": "ddp", "d_model": 512}
    write_summary(path, configuration, traces, rows, ["ddp_rank_0_trace.json"], {"peak MB": 812})
    text = path.read_text()
    step = overlap(traces[0]).per_step()
    for value in (step.span, step.computation, step.communication, step.exposed, step.idle):
        assert f"{value / 1000:.3f}" in text
    assert f"{step.overlap_fraction:.1%}" in text
    assert "CPU operators (a proxy)" in text
    assert re.search(r"aten::mm +45 +104\.000 +103\.365", text)
    assert re.search(rf"backward_pass +{step.phases['backward_pass'] / 1000:.3f}", text)
    assert re.search(r"d_model +512", text)
    assert re.search(r"peak MB +812", text)
    for expected in ("ddp_rank_0_trace.json", "chrome://tracing", "ui.perfetto.dev"):
        assert expected in text
    assert max(len(line) for line in text.splitlines()) <= 110
    assert [p.name for p in tmp_path.iterdir()] == ["ddp_summary.txt"]


def test_summary_says_which_engines_communicated(tmp_path):
    """Per step; a trace without kernels has no such section."""
    copies = Work("Memcpy PtoP (Device -> Device)", True, 6, 3000.0, 6 << 20)
    sums = Work("_combine_kernel", False, 3, 600.0, 0)
    trace = replace(made_up_trace(), transfers=[sums, copies])
    path = tmp_path / "ddp_summary.txt"
    write_summary(path, {}, [trace], [], [], budget=["a line"])
    text = path.read_text()
    assert re.search(r"copy engines +Memcpy PtoP \(Device -> Device\) +2\.0 +1\.000 +2\.0\n", text)
    assert re.search(r"multiprocessors +_combine_kernel +1\.0 +0\.200 +-\n", text)
    assert "Copy engines moved 2.0 MiB in 1.000 ms per step" in text
    assert "multiprocessors for 0.200 ms" in text
    assert re.search(r"Budget of a step, ms\n-+\na line\n", text)
    write_summary(path, {}, [made_up_trace()], [], [])
    assert "engine" not in path.read_text()
    assert "Budget" not in path.read_text()


def test_profile_writes_a_trace_that_loads(tmp_path):
    path = tmp_path / "new" / "trace.json"
    with profile(path, device_type="cpu", memory=False) as profiler:
        with phase("forward_pass"):
            product = torch.ones(8, 8, requires_grad=True) @ torch.ones(8, 8)
        with phase("backward_pass"):
            product.sum().backward()
    trace = load_trace(path)
    assert list(trace.phases) == ["forward_pass", "backward_pass"]
    assert trace.computation
    assert not trace.communication
    names = [row.name for row in slowest_operators(profiler, limit=3)]
    assert len(names) == 3
    everything = slowest_operators(profiler, limit=1000)
    assert "aten::mm" in [row.name for row in everything]
    assert "forward_pass" not in [row.name for row in everything]
    assert [r.self_us for r in everything] == sorted((r.self_us for r in everything), reverse=True)
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]


def test_failed_profile_leaves_no_file(tmp_path):
    with (
        pytest.raises(RuntimeError, match="step failed"),
        profile(tmp_path / "trace.json", device_type="cpu"),
    ):
        raise RuntimeError("step failed")
    assert list(tmp_path.iterdir()) == []


def test_a_busy_machine_is_said_and_drawn():
    def drawn(trace):
        return texts(timeline_figure({"ddp": [trace]}, "t").axes[0])

    calm = made_up_trace(lengths=(1e5, 1e5))
    assert disturbance([calm, calm]) is None
    assert "busy" not in drawn(calm)
    uneven = made_up_trace(lengths=(1e5, 1.9e5))
    assert "steps took 100 to 190 ms" in disturbance([uneven])
    assert "machine was busy" in drawn(uneven)
    late = made_up_trace(lengths=(2e5, 2e5), exposed=8e4)
    late = replace(late, waiting=[(1e5, 1.8e5), (3e5, 3.8e5)])
    assert "ranks waited 20% of the time for a slower one" in disturbance(
        [made_up_trace(lengths=(2e5, 2e5)), late]
    )
