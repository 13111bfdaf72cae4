"""Draws memory against time: what each mode costs of both, one panel per length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_by_hand.experiments.llama_fsdp.axes import (
    COLOURS,
    MARKERS,
    draw_column,
    memory_kind,
    set_range,
    stacked,
)
from ddp_by_hand.experiments.llama_fsdp.results import (
    BASELINE,
    baseline_of,
    lengths_of,
    memory_ratio,
    time_ratio,
)
from ddp_by_hand.measure import OK
from ddp_by_hand.measure.picture import FAINT, INK, frame


def draw_tradeoff(results: Sequence[dict]) -> Any:
    """Draws one panel per length: left is faster, down is smaller, lines mark `no_dp`."""
    lengths = lengths_of(results)
    title = "What each mode pays in memory and in time"
    figure, all_axes = stacked(results, title, len(lengths), 2.35, 0.78, width=0.5)
    for axes, length in zip(all_axes, lengths, strict=True):
        own = [r for r in results if r["seq_length"] == length]
        _points(axes, own, baseline_of(results, length))
        axes.set_title(f"{length:,} tokens", size=9.5, weight="bold", color=INK, loc="left")
        axes.set_xlabel("ms per step (median)", size=8.5, color=FAINT, loc="left")
        axes.set_ylabel(f"GiB {memory_kind(results)}", size=8.5, color=FAINT)
    label = all_axes[-1].xaxis.label
    label.set_text(
        f"{label.get_text()}; bars: 10th to 90th percentile. Left is faster, down is smaller; "
        f"dashed: {BASELINE}.\nAxes show where the points are and need not begin at 0: the labels "
        "have the ratios"
    )
    return figure


def _points(axes: Any, results: Sequence[dict], base: dict | None) -> None:
    good = [r for r in results if r["status"] == OK and r["peak_memory_gb"] is not None]
    labels = []
    for r in good:
        x, y = r["median_time_ms"], r["peak_memory_gb"]
        colour = COLOURS[r["mode"]]
        axes.plot([r["p10_time_ms"], r["p90_time_ms"]], [y, y], color=colour, lw=1.2)
        axes.plot(x, y, MARKERS[r["mode"]], ms=7, color=colour)
        found, memory = time_ratio(r, base), memory_ratio(r, base)
        ratios = "" if r is base or found is None else f"  {found.value:.2f}x time"
        ratios += "" if r is base or memory is None else f", {memory:.2f}x memory"
        labels.append((x, y, r["mode"] + ratios, colour))
    failed = [r for r in results if r not in good]
    if good:
        xs = [x for r in good for x in (r["p10_time_ms"], r["p90_time_ms"])]
        set_range(axes.set_xlim, xs)
        set_range(axes.set_ylim, [r["peak_memory_gb"] for r in good])
        if base is not None and base["peak_memory_gb"] is not None:
            dashes = {"color": FAINT, "lw": 0.8, "ls": (0, (4, 3)), "zorder": 0.5}
            axes.axvline(base["median_time_ms"], **dashes)
            axes.axhline(base["peak_memory_gb"], **dashes)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    frame(axes, "bottom", "left")
    draw_column(axes, labels, [f"{r['mode']}: {r['status']}" for r in failed],
                [MARKERS[r["mode"]] for r in good])  # fmt: skip
