"""The picture: one training step of each implementation, under each other on one time axis.

One panel per implementation, one lane per rank; in each lane computation above, communication
below it. Communication that computation hides is pale, exposed communication is strong and hatched.
So a synchronous variant is seen, without reading, as a strong block after the end of backward, and
an overlapped one as a pale block under it. A rank that waits for a slower one has a grey, dotted
block, which ends where the slower rank begins the same collective: all lanes have one clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ddp_by_hand.measure.picture import (
    FAINT,
    INK,
    frame,
    new_figure,
    save_picture,
    write_key,
    write_note,
)

from .intervals import Interval, difference, intersection, union
from .overlap import Overlap, disturbance, hidden_fraction, overlap, representative_step
from .phases import PARTS_OF_BACKWARD
from .trace import Trace
from .waiting import share_clock

if TYPE_CHECKING:  # ranks that draw nothing start half a second earlier
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LANES = 4

# Okabe and Ito's palette: told apart by colour-blind readers and, by lightness, in grey print.
COMPUTATION = "#0072B2"
HIDDEN = "#F3C7A4"
EXPOSED = "#D55E00"
WAITING = "#BDBDBD"
TINTS = {  # phase: (label, background, label's colour)
    "forward_pass": ("forward", "#E4EEF8", "#35608A"),
    "backward_pass": ("backward", "#E3F1E4", "#3D7345"),
    # of a private step; they lie in backward, are drawn over it and labelled in its place
    "norm_pass": ("norms", "#E3F1E4", "#3D7345"),
    "clip_coefficients": ("clip", "#F4E3EC", "#8A3B66"),
    "weighted_sum": ("sums", "#C9E4CD", "#2C5C35"),
    "gradient_sync": ("sync", "#FAF0C8", "#6B5B00"),
    "noise": ("noise", "#F4E3EC", "#8A3B66"),
    "gradient_clipping_warmup": ("clip", "#E9E9E9", "#555555"),
    "optimizer_step": ("optimizer", "#EAE6F2", "#5F4B8B"),
}

SENTENCE = (
    "Computation above, communication below: the hatched blocks are communication that nothing "
    "hides, which makes a step longer; pale ones cost nothing."
)
LANE, HEADER = 0.46, 0.34  # inches: one rank, and the panel's line of names above the lanes
ROWS = {"computation": (0.52, 0.40), "communication": (0.08, 0.40)}  # (bottom, height) in a lane


@dataclass(frozen=True)
class Lane:
    """One step of one rank, in milliseconds from the start of the first rank's step.

    Without a common clock, from this rank's own start. `waiting` that computation hides is left
    out: nothing is lost by it.
    """

    rank: int
    end: float
    computation: list[Interval]
    hidden: list[Interval]
    exposed: list[Interval]
    waiting: list[Interval]
    phases: dict[str, list[Interval]]


def draw_timeline(
    traces: dict[str, list[Trace]], path: str | Path, title: str = "One training step"
) -> None:
    """Draws one representative step of each implementation, {name: traces, one per rank}."""
    save_picture(timeline_figure(traces, title), path, SENTENCE)


def timeline_figure(traces: dict[str, list[Trace]], title: str) -> Figure:
    """Returns the figure of `draw_timeline`, not saved."""
    empty = [name for name, ranks in traces.items() if not ranks]
    if empty or not traces:
        raise ValueError(f"draw_timeline: no trace of {', '.join(empty) or 'any implementation'}")
    windows = {name: representative_step(ranks) for name, ranks in traces.items()}
    panels = {name: _lanes(ranks, windows[name]) for name, ranks in traces.items()}
    counts = [len(lanes[:MAX_LANES]) for lanes in panels.values()]
    figure, all_axes = _empty_figure(counts, title)
    axis_end = max(lane.end for lanes in panels.values() for lane in lanes[:MAX_LANES])
    for axes, (name, lanes) in zip(all_axes, panels.items(), strict=True):
        measured = [overlap(t, w) for t, w in zip(traces[name], windows[name], strict=True)]
        _draw_panel(axes, lanes[:MAX_LANES], axis_end)
        disturbed = disturbance(traces[name]) is not None
        _write_figures(axes, name, measured, len(lanes[:MAX_LANES]), disturbed)
    all_axes[-1].set_xlabel("milliseconds since the step's first forward pass began", fontsize=9)
    all_axes[-1].tick_params(labelbottom=True)
    _write_words(figure, traces)
    return figure


def _lanes(traces: list[Trace], windows: list[Interval]) -> list[Lane]:
    first = min(start for start, _ in windows)
    together = share_clock(traces)
    return [_lane(t, w, first if together else w[0]) for t, w in zip(traces, windows, strict=True)]


def _lane(trace: Trace, window: Interval, start: float) -> Lane:
    def in_window(intervals: list[Interval]) -> list[Interval]:
        inside = intersection(intervals, [window])
        return [((a - start) / 1000, (b - start) / 1000) for a, b in inside]

    return Lane(
        rank=trace.rank,
        end=(window[1] - start) / 1000,
        computation=in_window(union(trace.computation)),
        hidden=in_window(intersection(trace.communication, trace.computation)),
        exposed=in_window(difference(trace.communication, trace.computation)),
        waiting=in_window(difference(trace.waiting, trace.computation)),
        phases={name: in_window(found) for name, found in trace.phases.items()},
    )


def _empty_figure(lane_counts: list[int], title: str) -> tuple[Figure, list[Axes]]:
    """Returns panels under each other, laid out in inches: lanes look alike in every picture."""
    heights = [HEADER + LANE * max(count, 2) for count in lane_counts]
    top, bottom, gap = 0.78, 1.25, 0.12
    height = top + bottom + sum(heights) + gap * (len(heights) - 1)
    figure = new_figure(height, title, [])
    all_axes, y = [], height - top
    for panel_height in heights:
        y -= panel_height
        all_axes.append(figure.add_axes((0.075, y / height, 0.745, panel_height / height)))
        y -= gap
    return figure, all_axes


def _draw_panel(axes: Axes, lanes: list[Lane], axis_end: float) -> None:
    lane_height = max(len(lanes), 2) / len(lanes)  # a single lane fills the panel
    for index, lane in enumerate(lanes):
        _draw_lane(axes, lane, -(index + 1) * lane_height, lane_height)
    _label_phases(axes, lanes[0], axis_end)
    axes.set_xlim(0, axis_end * 1.005)
    axes.set_ylim(-lane_height * len(lanes), HEADER / LANE)
    middles = [-(index + 0.5) * lane_height for index in range(len(lanes))]
    axes.set_yticks(middles, [f"rank {lane.rank}" for lane in lanes])
    frame(axes, "bottom")
    axes.tick_params(labelsize=9, length=0, axis="y")
    axes.tick_params(labelbottom=False, axis="x")


def _draw_lane(axes: Axes, lane: Lane, bottom: float, height: float) -> None:
    def bars(intervals: list[Interval], row: tuple[float, float], **style) -> None:
        spans = [(start, end - start) for start, end in intervals]
        axes.broken_barh(spans, (bottom + row[0] * height, row[1] * height), **style)

    for phase, (_, tint, _) in TINTS.items():
        bars(lane.phases.get(phase, []), (0, 0.98), facecolor=tint, linewidth=0)
    bars(lane.computation, ROWS["computation"], facecolor=COMPUTATION, linewidth=0)
    bars(lane.hidden, ROWS["communication"], facecolor=HIDDEN, linewidth=0)
    style = {"facecolor": WAITING, "edgecolor": "white", "hatch": "....", "linewidth": 0}
    bars(lane.waiting, ROWS["communication"], **style)
    style = {"facecolor": EXPOSED, "edgecolor": "white", "hatch": "/////", "linewidth": 0}
    bars(lane.exposed, ROWS["communication"], **style)
    for _, end in lane.phases.get("backward_pass", []):
        axes.plot([end, end], [bottom, bottom + 0.98 * height], color=INK, linewidth=1.6)


def _label_phases(axes: Axes, lane: Lane, axis_end: float) -> None:
    """Names each phase above the first lane, where the name fits."""
    divided = any(part in lane.phases for part in PARTS_OF_BACKWARD)
    for phase, (label, _, ink) in TINTS.items():
        if divided and phase == "backward_pass":
            continue
        for start, end in lane.phases.get(phase, []):
            if end - start > axis_end * 0.0135 * len(label):
                axes.text(
                    (start + end) / 2, 0.08, label, ha="center", va="bottom", fontsize=8, color=ink
                )


def _write_figures(
    axes: Axes, name: str, measured: list[Overlap], drawn: int, is_disturbed: bool
) -> None:
    """Writes the panel's name and, right of it, its numbers: means over all ranks."""
    style = {"transform": axes.transAxes, "va": "top", "color": INK}
    axes.text(0, 1.0, name, weight="bold", fontsize=10, **style)
    if len(measured) > drawn:
        note = f"first {drawn} of {len(measured)} ranks"
        axes.text(0.995, 1.0, note, ha="right", fontsize=8, **style)
    hidden = hidden_fraction(measured)
    lines = [
        (f"step {fmean(m.span for m in measured) / 1000:.1f} ms", INK, "bold"),
        (f"exposed {fmean(m.exposed for m in measured) / 1000:.1f} ms", EXPOSED, "bold"),
        (f"waiting {fmean(m.waiting for m in measured) / 1000:.1f} ms", FAINT, "bold"),
        ("no communication" if hidden is None else f"{hidden:.0%} hidden", INK, "normal"),
    ]
    if not any(m.waiting for m in measured):
        del lines[2]
    if is_disturbed:
        lines.append(("machine was busy", EXPOSED, "bold"))
    for row, (text, colour, weight) in enumerate(lines):
        axes.annotate(
            text,
            (1, 1),
            xytext=(10, -24 - 14 * row),
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            fontsize=10,
            color=colour,
            weight=weight,
        )


def _write_words(figure: Figure, traces: dict[str, list[Trace]]) -> None:
    """Writes legend and footnote."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hatched = {"edgecolor": "white"}
    handles = [
        Patch(facecolor=COMPUTATION, label="computation"),
        Patch(facecolor=HIDDEN, label="hidden communication"),
        Patch(facecolor=EXPOSED, hatch="/////", label="exposed communication", **hatched),
        Patch(facecolor=WAITING, hatch="....", label="waiting for a slower rank", **hatched),
        Line2D([], [], color=INK, linewidth=1.6, label="end of backward"),
    ]
    write_key(figure, handles, 0.32, columns=5)
    bases = sorted({trace.basis for ranks in traces.values() for trace in ranks})
    one_clock = all(share_clock(ranks) for ranks in traces.values())
    clock = "all ranks on one clock" if one_clock else "each rank from its own start"
    note = (
        "Each rank has two bars, computation above and communication below. Hidden: the rank "
        "computes at the same time.\nExposed: it computes nothing meanwhile. Waiting: it computes "
        "nothing, and a slower rank has not begun the collective.\nBackgrounds: forward blue, "
        "backward green, synchronization (sync) yellow, clipping grey, optimizer lilac.\n"
        f"Measured from {', '.join(bases)}. The step of median "
        f"length, {clock}; numbers are means over ranks."
    )
    if any(map(disturbance, traces.values())):
        note += (
            "\nMachine was busy: other programs made steps longer and ranks wait; profile again."
        )
    write_note(figure, note)
