"""Bars of memory and of time, a group for each sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp_by_hand.experiments.llama_fsdp.axes import (
    COLOURS,
    FOOT,
    HEAD,
    KEY,
    LATER,
    ROOM,
    ROW,
    draw_key,
    interval_words,
    memory_kind,
)
from ddp_by_hand.experiments.llama_fsdp.results import (
    BASELINE,
    PART,
    describe_run,
    good,
    lengths_of,
    mode_of,
)
from ddp_by_hand.measure import OK, summarize
from ddp_by_hand.measure.bars import draw_steps, finish_bars, write_behind, write_reason
from ddp_by_hand.measure.picture import new_figure, three_digits, wrap
from ddp_by_hand.measure.runs import SECTION, Cell, beside, memory_beside, ratio_beside


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
