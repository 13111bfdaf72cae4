"""Draws ratios to `no_dp` over the lengths: step, forward and backward, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_by_hand.experiments.llama_fsdp.axes import (
    COLOURS,
    draw_column,
    interval_words,
    set_range,
    stacked,
)
from ddp_by_hand.experiments.llama_fsdp.results import (
    BASELINE,
    MODES,
    baseline_of,
    lengths_of,
    memory_ratio,
    time_ratio,
)
from ddp_by_hand.measure import OK
from ddp_by_hand.measure.picture import FAINT, INK, frame

BROKEN = " (the axis does not begin at 0)"


def draw_overhead(results: Sequence[dict]) -> Any:
    """Draws ratios to `no_dp`: of the step, of forward and backward alone, of memory."""
    lengths = lengths_of(results)
    panels = [
        ("Complete step", "step_ms"),
        ("Forward and backward, with clipping and exchange", "forward_backward_ms"),
        ("Peak memory", None),
    ]
    heading = f"The cost of privacy: each mode over {BASELINE}"
    figure, all_axes = stacked(results, heading, len(panels), 2.1, 0.62, width=0.58)
    for axes, (title, key) in zip(all_axes, panels, strict=True):
        _curves(axes, results, lengths, key)
        axes.set_title(
            title + (BROKEN if axes.get_ylim()[0] > 0 else ""), size=9.5, weight="bold", color=INK,
            loc="left",
        )  # fmt: skip
        axes.set_ylabel(f"times {BASELINE}", size=8.5, color=FAINT)
    bars = f"bars: the ratio's {interval_words(results)}"
    label = f"tokens per sample; {bars}; dashed: {BASELINE}"
    all_axes[-1].set_xlabel(label, size=8.5, color=FAINT, loc="left")
    return figure


def _curves(axes: Any, results: Sequence[dict], lengths: list[int], key: str | None) -> None:
    places = {length: float(i) for i, length in enumerate(lengths)}
    labels, notes, values = [], [], [1.0]
    for mode in MODES:
        own = [r for r in results if r["mode"] == mode]
        if mode == BASELINE or not own:
            continue
        points = [(places[r["seq_length"]], *_against(r, results, key)) for r in own]
        points = [p for p in points if p[1] is not None]
        lost = [f"{r['seq_length']:,}: {r['status']}" for r in own if r["status"] != OK]
        notes += [f"{mode} at {', '.join(lost)}"] if lost else []
        if not points:
            continue
        x, y, low, high = (np.array(v) for v in zip(*points, strict=True))
        shift = 0.05 * (list(MODES).index(mode) - 2.5)  # intervals beside each other
        colour = COLOURS[mode]
        axes.errorbar(
            x + shift, y, [np.maximum(y - low, 0), np.maximum(high - y, 0)], color=colour,
            marker="o", ms=5, lw=1.4, elinewidth=1, capsize=2,
        )  # fmt: skip
        labels.append((x[-1] + shift, y[-1], f"{mode}  {y[-1]:.2f}x", colour))
        values += [*low, *high]
    axes.axhline(1.0, color=FAINT, lw=0.8, ls=(0, (4, 3)), zorder=0.5)
    axes.set_xlim(-0.4, len(lengths) - 0.6)
    axes.set_xticks(list(places.values()), [f"{length:,}" for length in lengths])
    set_range(axes.set_ylim, values)
    frame(axes, "bottom", "left")
    missing = [n for n in lengths if baseline_of(results, n) is None]
    if missing:
        notes.append(f"no {BASELINE} to compare with at {', '.join(map(str, missing))}")
    draw_column(axes, labels, notes)


def _against(result: dict, results: Sequence[dict], key: str | None) -> tuple:
    """Returns (ratio, low, high), each None without a measurement."""
    base = baseline_of(results, result["seq_length"])
    if result["status"] != OK:
        return None, None, None
    if key is None:
        value = memory_ratio(result, base)
        return value, value, value
    found = time_ratio(result, base, key)
    return (None, None, None) if found is None else (found.value, found.low, found.high)
