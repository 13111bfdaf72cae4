"""Colours, sizes, titles and labels that the pictures of `experiments.llama_fsdp` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp_by_hand.experiments.llama_fsdp.results import describe_run, good_rounds
from ddp_by_hand.measure import OK
from ddp_by_hand.measure.picture import FAINT, apart, new_figure, wrap

COLOURS = {
    "no_dp": "#6B6B6B",
    "ghost_fsdp": "#E69F00",
    "flash_fsdp": "#D55E00",
    "bookkeeping_fsdp": "#56B4E9",
    "flash_bookkeeping_fsdp": "#0072B2",
}
MARKERS = dict(zip(COLOURS, "os^Dv", strict=True))
LATER = "#D9D9D9"
HEAD, KEY, FOOT = 0.76, 0.26, 0.6  # inches above and below the axes; of a legend
ROW, GAP = 0.34, 0.42  # inches: of a bar, and between the lengths
ROOM = 1.5  # width of the axes in widths of the longest bar: text stands behind bars
COLUMN = 1.06  # where labels begin, in widths of the axes that hold the points


def draw_key(figure: Any, entries: Sequence[tuple[str, list[str]]]) -> None:
    """Draws the key of colours below the subtitle; an entry may have several colours."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    figure.legend(
        [tuple(Patch(color=colour) for colour in colours) for _, colours in entries],
        [text for text, _ in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper left", bbox_to_anchor=(0.004, 1 - 0.66 / figure.get_figheight()), ncols=2,
        frameon=False, fontsize=8.5, handlelength=2.4, columnspacing=2.5,
    )  # fmt: skip


def interval_words(results: Sequence[dict]) -> str:
    """Names the intervals of ratios; those of a single round do not cover differences of rounds."""
    rounds = [len(good_rounds(r)) for r in results if r["status"] == OK]
    return f"95 % interval{' within the one round' if max(rounds, default=0) == 1 else ''}"


def memory_kind(results: Sequence[dict]) -> str:
    return "allocated" if any(r["num_gpus"] for r in results) else "resident"


def stacked(
    results: Sequence[dict], title: str, count: int, panel: float, between: float, width: float
) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes under each other; heights are in inches."""
    height = HEAD + KEY + count * (panel + between) - between + FOOT
    figure = new_figure(height, title, wrap(describe_run(results), 122), size=8.5)
    bottoms = [FOOT + n * (panel + between) for n in reversed(range(count))]
    return figure, [
        figure.add_axes((0.085, bottom / height, width, panel / height)) for bottom in bottoms
    ]


def set_range(setter: Callable[[float, float], Any], values: Sequence[float]) -> None:
    """Sets an axis range with a margin of 30 % of the points' extent, and of 3 % at least."""
    low, high = min(values), max(values)
    room = 0.3 * max(high - low, 0.1 * high)
    setter(max(0.0, low - room), high + room)


def draw_column(
    axes: Any,
    labels: Sequence[tuple[float, float, str, str]],
    notes: Sequence[str] = (),
    markers: Sequence[str] = (),
) -> None:
    """Writes labels (x, y, text, colour) right of the axes, at least a line apart, tied to points.

    Notes stand below them. With `markers`, one a label, a label has its point's in place of a line
    to it, which would cross other points where they are at any x.
    """
    shapes = dict(zip(labels, markers, strict=True)) if markers else {}
    count = len(labels) + len(notes)
    if not count:
        return
    line = min(0.105, 1.0 / (count + 1))
    low, high = axes.get_ylim()
    ordered = sorted(labels, key=lambda label: label[1])
    floor = line * (len(notes) + 0.4) if notes else 0.0
    points = [(y - low) / (high - low) for _, y, _, _ in ordered]
    heights = apart(points, line, floor, 1 - line / 2)
    place = axes.transAxes
    for label, height in zip(ordered, heights, strict=True):
        x, y, text, colour = label
        if label in shapes:
            axes.plot(
                COLUMN, height, shapes[label], ms=6, color=colour, transform=place, clip_on=False
            )
            axes.text(
                COLUMN + 0.03, height, text, size=8.5, color=colour, va="center", transform=place
            )
            continue
        axes.annotate(
            text, (x, y), xytext=(COLUMN, height), textcoords=place, size=8.5, color=colour,
            va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "alpha": 0.6,
                        "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 4},
        )  # fmt: skip
    for i, note in enumerate(reversed(notes)):
        axes.text(
            COLUMN, line * (i + 0.4), note, size=8.5, style="italic", color=FAINT, va="center",
            transform=place,
        )  # fmt: skip
