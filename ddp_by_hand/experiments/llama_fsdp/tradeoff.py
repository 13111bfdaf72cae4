"""Draws memory against time: what each mode costs of both, one panel per length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_by_hand.experiments.llama_fsdp.axes import (
    COLOURS,
    MARKERS,
    memory_kind,
    set_range,
    stacked,
)
from ddp_by_hand.experiments.llama_fsdp.results import BASELINE, good, lengths_of, mode_of
from ddp_by_hand.measure import summarize
from ddp_by_hand.measure.picture import FAINT, INK, Label, frame, write_labels
from ddp_by_hand.measure.runs import SECTION, Cell, beside, memory_beside, ratio_beside


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
