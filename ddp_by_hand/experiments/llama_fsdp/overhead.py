"""Draws ratios to `no_dp` over the lengths: step, forward and backward, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_by_hand.experiments.llama_fsdp.axes import COLOURS, interval_words, set_range, stacked
from ddp_by_hand.experiments.llama_fsdp.results import BASELINE, MODES, PART, lengths_of, mode_of
from ddp_by_hand.measure import OK
from ddp_by_hand.measure.picture import FAINT, INK, Label, frame, write_labels
from ddp_by_hand.measure.runs import (
    SECTION,
    STEP,
    Cell,
    beside,
    memory_beside,
    ratio_beside,
)
from ddp_by_hand.measure.statistics import Ratio

BROKEN = " (the axis does not begin at 0)"


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
