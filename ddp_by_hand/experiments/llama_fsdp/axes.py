"""Colours, sizes, titles and labels that the pictures of `experiments.llama_fsdp` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp_by_hand.experiments.llama_fsdp.results import describe_run, good, on_gpu
from ddp_by_hand.measure.picture import new_figure, wrap, write_key
from ddp_by_hand.measure.runs import Cell

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
ROW = 0.34  # inches of a bar
ROOM = 1.5  # width of the axes in widths of the longest bar: text stands behind bars


def draw_key(figure: Any, entries: Sequence[tuple[str, list[str]]]) -> None:
    """Draws the key of colours below the subtitle; an entry may have several colours."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    write_key(
        figure, [tuple(Patch(color=colour) for colour in colours) for _, colours in entries],
        0.66, columns=2, labels=[text for text, _ in entries], handlelength=2.4, columnspacing=2.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def interval_words(cells: Sequence[Cell]) -> str:
    """Names the intervals of ratios; those of a single round do not cover differences of rounds."""
    rounds = [len(cell.good_rounds) for cell in good(cells)]
    return f"95 % interval{' within the one round' if max(rounds, default=0) == 1 else ''}"


def memory_kind(cells: Sequence[Cell]) -> str:
    return "allocated" if any(map(on_gpu, cells)) else "resident"


def stacked(
    cells: Sequence[Cell], title: str, count: int, panel: float, between: float, width: float
) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes under each other; heights are in inches."""
    height = HEAD + KEY + count * (panel + between) - between + FOOT
    figure = new_figure(height, title, wrap(describe_run(cells), 122), size=8.5)
    bottoms = [FOOT + n * (panel + between) for n in reversed(range(count))]
    return figure, [
        figure.add_axes((0.085, bottom / height, width, panel / height)) for bottom in bottoms
    ]


def set_range(setter: Callable[[float, float], Any], values: Sequence[float]) -> None:
    """Sets an axis range with a margin of 30 % of the points' extent, and of 3 % at least."""
    low, high = min(values), max(values)
    room = 0.3 * max(high - low, 0.1 * high)
    setter(max(0.0, low - room), high + room)
