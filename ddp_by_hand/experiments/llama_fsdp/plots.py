"""The four pictures of `experiments.llama_fsdp`, from its results.

| file | question |
| --- | --- |
| memory_comparison | how much memory does a mode need, at each length? |
| time_comparison | how long is a step, and what part of it is noise and AdamW? |
| memory_vs_time_tradeoff | what does a mode pay in one for the other? |
| overhead_analysis | how does the overhead over `no_dp` change with the length? |

Every mark is labelled: where it stands, on its right, or beside the shape of its point. A cell that
failed says so in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddp_by_hand.experiments.llama_fsdp.results import (
    BASELINE,
    MODES,
    PART,
    describe_run,
    good,
    lengths_of,
    mode_of,
    on_gpu,
)
from ddp_by_hand.measure import OK, summarize
from ddp_by_hand.measure.bars import draw_steps, finish_bars, write_behind, write_reason
from ddp_by_hand.measure.picture import (
    FAINT,
    INK,
    Label,
    frame,
    new_figure,
    save_picture,
    three_digits,
    wrap,
    write_key,
    write_labels,
)
from ddp_by_hand.measure.runs import SECTION, STEP, Cell, beside, memory_beside, ratio_beside
from ddp_by_hand.measure.statistics import Ratio

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
BROKEN = " (the axis does not begin at 0)"
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


def draw_memory(cells: Sequence[Cell]) -> Any:
    def bar(axes: Any, y: float, cell: Cell, limit: float) -> None:
        value = cell.peak_memory_mb and cell.peak_memory_mb / 1024
        if value is None:
            write_reason(axes, y, limit, "memory is not known on this system")
            return
        axes.barh(y, value, height=0.7, color=COLOURS[mode_of(cell)])
        found = memory_beside(cell, beside(cells, cell, "mode", BASELINE))
        ratio = "" if found is None else f"{found:.2f}x {BASELINE}"
        write_behind(axes, value + 0.012 * limit, y, f"{value:.2f} GiB", ratio)

    return _bars(
        cells, bar, [(cell.peak_memory_mb or 0.0) / 1024 for cell in good(cells)],
        "Peak memory of each mode",
        f"GiB {memory_kind(cells)}, of the largest rank, after warm-up",
    )  # fmt: skip


def draw_time(cells: Sequence[Cell]) -> Any:
    beyond: list[int] = []

    def bar(axes: Any, y: float, cell: Cell, limit: float) -> None:
        median = summarize(cell.samples()).median
        part = min(summarize(cell.samples(PART)).median, median)
        axes.barh(y, part, height=0.7, color=COLOURS[mode_of(cell)])
        axes.barh(y, median - part, left=part, height=0.7, color=LATER)
        beyond.append(draw_steps(axes, y, cell.samples(), limit)[1])
        found = ratio_beside(cell, beside(cells, cell, "mode", BASELINE))
        ratio = "" if found is None else f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]"
        ratio += f"  (+{beyond[-1]})" * bool(beyond[-1])
        # In one column: behind a bar's last dot the number would look like that dot's.
        write_behind(axes, 1.03 * limit, y, f"{three_digits(median)} ms", ratio)

    steps = [summarize(cell.samples()) for cell in good(cells)]
    figure = _bars(
        cells, bar, [end for step in steps for end in (step.median, step.p90)],
        "Time of a step in each mode",
        "ms per step of the slowest rank; bar: median, dots: steps; on the right the median\nand "
        f"its ratio to {BASELINE} [{interval_words(cells)}]",
        head=HEAD + KEY,
    )  # fmt: skip
    if any(beyond):
        label = figure.axes[0].xaxis.label
        label.set_text(f"{label.get_text()}; (+n): n steps are beyond the axis")
    draw_key(figure, [
        ("forward, backward, clipping, exchange", list(COLOURS.values())),
        ("noise (of private modes) and AdamW", [LATER]),
    ])  # fmt: skip
    return figure


def _bars(
    cells: Sequence[Cell],
    bar: Callable[[Any, float, Cell, float], None],
    ends: Sequence[float],
    title: str,
    unit: str,
    head: float = HEAD,
) -> Any:
    """Draws one group of bars per length, from the top, each below a row with the length."""
    rows: list[Cell | None] = []
    names = []
    for length in lengths_of(cells):
        own = [cell for cell in cells if cell.names[SECTION] == length]
        rows += [None, *own]
        names += [f"{length:,} tokens", *map(mode_of, own)]
    inches = ROW * len(rows)
    height = head + inches + FOOT
    figure = new_figure(height, title, wrap(describe_run(cells), 122), size=8.5)
    axes = figure.add_axes((0.235, FOOT / height, 0.75, inches / height))
    limit = 1.02 * max(ends, default=1.0) or 1.0
    for y, cell in enumerate(rows):
        if cell is not None and cell.status == OK:
            bar(axes, y, cell, limit)
        elif cell is not None:
            write_reason(axes, y, limit, f"{cell.status}: {cell.reason}")
    finish_bars(axes, names, limit, ROOM, unit)
    for tick, cell in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_weight("normal" if cell else "bold")
    return figure


def draw_tradeoff(cells: Sequence[Cell]) -> Any:
    """Draws one panel per length: left is faster, down is smaller, lines mark `no_dp`."""
    lengths = lengths_of(cells)
    title = "What each mode pays in memory and in time"
    figure, all_axes = stacked(cells, title, len(lengths), 2.35, 0.78, width=0.5)
    for axes, length in zip(all_axes, lengths, strict=True):
        _points(axes, [cell for cell in cells if cell.names[SECTION] == length])
        axes.set_title(f"{length:,} tokens", size=9.5, weight="bold", color=INK, loc="left")
        axes.set_xlabel("ms per step (median)", size=8.5, color=FAINT, loc="left")
        axes.set_ylabel(f"GiB {memory_kind(cells)}", size=8.5, color=FAINT)
    label = all_axes[-1].xaxis.label
    label.set_text(
        f"{label.get_text()}; bars: 10th to 90th percentile. Left is faster, down is smaller; "
        f"dashed: {BASELINE}.\nAxes show where the points are and need not begin at 0: the labels "
        "have the ratios"
    )
    return figure


def _points(axes: Any, cells: Sequence[Cell]) -> None:
    known = [cell for cell in good(cells) if cell.peak_memory_mb is not None]
    labels, xs, ys = [], [], []
    for cell in known:
        step, y, colour = (
            summarize(cell.samples()),
            cell.peak_memory_mb / 1024,
            COLOURS[mode_of(cell)],
        )
        xs, ys = [*xs, step.p10, step.p90], [*ys, y]
        axes.plot([step.p10, step.p90], [y, y], color=colour, lw=1.2)
        axes.plot(step.median, y, MARKERS[mode_of(cell)], ms=7, color=colour)
        base = beside(cells, cell, "mode", BASELINE)
        found, memory = ratio_beside(cell, base), memory_beside(cell, base)
        text = mode_of(cell) + ("" if found is None else f"  {found.value:.2f}x time")
        text += "" if memory is None else f", {memory:.2f}x memory"
        labels.append(Label(step.median, y, text, colour, MARKERS[mode_of(cell)]))
        if mode_of(cell) == BASELINE:
            dashes = {"color": FAINT, "lw": 0.8, "ls": (0, (4, 3)), "zorder": 0.5}
            axes.axvline(step.median, **dashes)
            axes.axhline(y, **dashes)
    if known:
        set_range(axes.set_xlim, xs)
        set_range(axes.set_ylim, ys)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    frame(axes, "bottom", "left")
    write_labels(axes, labels, [f"{mode_of(c)}: {c.status}" for c in cells if c not in known])


def draw_overhead(cells: Sequence[Cell]) -> Any:
    """Draws ratios to `no_dp`: of the step, of forward and backward alone, of memory."""
    panels = [
        ("Complete step", STEP),
        ("Forward and backward, with clipping and exchange", PART),
        ("Peak memory", None),
    ]
    heading = f"The cost of privacy: each mode over {BASELINE}"
    figure, all_axes = stacked(cells, heading, len(panels), 2.1, 0.62, width=0.58)
    for axes, (title, metric) in zip(all_axes, panels, strict=True):
        _curves(axes, cells, metric)
        axes.set_title(
            title + (BROKEN if axes.get_ylim()[0] > 0 else ""), size=9.5, weight="bold", color=INK,
            loc="left",
        )  # fmt: skip
        axes.set_ylabel(f"times {BASELINE}", size=8.5, color=FAINT)
    bars = f"bars: the ratio's {interval_words(cells)}"
    label = f"tokens per sample; {bars}; dashed: {BASELINE}"
    all_axes[-1].set_xlabel(label, size=8.5, color=FAINT, loc="left")
    return figure


def _curves(axes: Any, cells: Sequence[Cell], metric: str | None) -> None:
    lengths = lengths_of(cells)
    labels, notes, values = [], [], [1.0]
    for mode in MODES:
        own = [cell for cell in cells if mode_of(cell) == mode != BASELINE]
        points = [
            (lengths.index(cell.names[SECTION]), *ratio)
            for cell in own if (ratio := _against(cell, cells, metric))
        ]  # fmt: skip
        lost = [f"{c.names[SECTION]:,}: {c.status}" for c in own if c.status != OK]
        notes += [f"{mode} at {', '.join(lost)}"] if lost else []
        if not points:
            continue
        x, y, low, high = (np.array(v) for v in zip(*points, strict=True))
        x = x + 0.05 * (list(MODES).index(mode) - 2.5)  # intervals beside each other
        axes.errorbar(
            x, y, [np.maximum(y - low, 0), np.maximum(high - y, 0)], color=COLOURS[mode],
            marker="o", ms=5, lw=1.4, elinewidth=1, capsize=2,
        )  # fmt: skip
        labels.append(Label(x[-1], y[-1], f"{mode}  {y[-1]:.2f}x", COLOURS[mode]))
        values += [*low, *high]
    axes.axhline(1.0, color=FAINT, lw=0.8, ls=(0, (4, 3)), zorder=0.5)
    axes.set_xlim(-0.4, len(lengths) - 0.6)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    set_range(axes.set_ylim, values)
    frame(axes, "bottom", "left")
    compared = {c.names[SECTION] for c in cells if mode_of(c) == BASELINE and c.status == OK}
    if missing := [str(length) for length in lengths if length not in compared]:
        notes.append(f"no {BASELINE} to compare with at {', '.join(missing)}")
    write_labels(axes, labels, notes)


def _against(cell: Cell, cells: Sequence[Cell], metric: str | None) -> Ratio | None:
    base = beside(cells, cell, "mode", BASELINE)
    if metric is not None:
        return ratio_beside(cell, base, metric)
    value = memory_beside(cell, base)
    return value and Ratio(value, value, value)


PICTURES = {
    "memory_comparison": (
        draw_memory,
        f"Of bars of one length, what one is longer than that of {BASELINE} is memory that the "
        "mode costs.",
    ),
    "time_comparison": (
        draw_time,
        "The coloured part of a bar is forward, backward, clipping and exchange, the grey end "
        f"noise and AdamW: a mode is cheap where both end near those of {BASELINE}.",
    ),
    "memory_vs_time_tradeoff": (
        draw_tradeoff,
        "A point left of and below another is better in both; one near the crossing of the dashed "
        f"lines costs hardly more than {BASELINE}.",
    ),
    "overhead_analysis": (
        draw_overhead,
        "A line that falls towards 1 is an overhead that longer samples pay off, a level one is "
        "paid at every length; intervals that overlap show no difference between modes.",
    ),
}
"""File -> what draws it, and how to read it."""


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Writes all four; returns their paths."""
    paths = [folder / f"{name}.png" for name in PICTURES]
    for path, (make, sentence) in zip(paths, PICTURES.values(), strict=True):
        save_picture(make(cells), path, sentence)
    return paths
