"""Bars of memory and of time, a group for each sequence length."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp_by_hand.experiments.llama_fsdp.axes import (
    COLOURS,
    FOOT,
    GAP,
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
    baseline_of,
    describe_run,
    good_rounds,
    lengths_of,
    memory_ratio,
    time_ratio,
)
from ddp_by_hand.measure import OK, describe_failure
from ddp_by_hand.measure.picture import FAINT, INK, frame, new_figure, three_digits, wrap


def draw_memory(results: Sequence[dict]) -> Any:
    def bar(axes: Any, y: float, r: dict, limit: float) -> None:
        value, against = r["peak_memory_gb"], memory_ratio(r, baseline_of(results, r["seq_length"]))
        if value is None:
            _words(axes, y, limit, "memory is not known on this system")
            return
        axes.barh(y, value, height=0.7, color=COLOURS[r["mode"]])
        ratio = "" if against is None or r["mode"] == BASELINE else f"{against:.2f}x {BASELINE}"
        _behind(axes, value + 0.012 * limit, y, f"{value:.2f} GiB", ratio)

    what = memory_kind(results)
    return _bars(
        results, bar, [r["peak_memory_gb"] or 0.0 for r in results if r["status"] == OK],
        "Peak memory of each mode", f"GiB {what}, of the largest rank, after warm-up",
    )  # fmt: skip


def draw_time(results: Sequence[dict]) -> Any:
    beyond: list[int] = []

    def bar(axes: Any, y: float, r: dict, limit: float) -> None:
        part, median = r["phases"]["forward_backward_ms"], r["median_time_ms"]
        part = min(part, median)
        axes.barh(y, part, height=0.7, color=COLOURS[r["mode"]])
        axes.barh(y, median - part, left=part, height=0.7, color=LATER)
        steps = np.array([x for one in good_rounds(r).values() for x in one["step_ms"]])
        shown = steps[steps <= limit]
        jitter = np.random.default_rng(0).uniform(-0.22, 0.22, shown.size)
        axes.plot(shown, y + jitter, "o", ms=2.6, mew=0.3, mec="white", color=INK)
        found = time_ratio(r, baseline_of(results, r["seq_length"]))
        ratio = ""
        if found is not None and r["mode"] != BASELINE:
            ratio = f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]"
        more = steps.size - shown.size
        beyond.append(more)
        # In one column: behind a bar's last dot the number would look like that dot's.
        _behind(
            axes, 1.03 * limit, y, f"{three_digits(median)} ms", ratio + f"  (+{more})" * bool(more)
        )

    ends = [
        end for r in results if r["status"] == OK for end in (r["median_time_ms"], r["p90_time_ms"])
    ]
    figure = _bars(
        results, bar, ends, "Time of a step in each mode",
        "ms per step of the slowest rank; bar: median, dots: steps; on the right the median\nand "
        f"its ratio to {BASELINE} [{interval_words(results)}]",
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
    results: Sequence[dict],
    bar: Callable[[Any, float, dict, float], None],
    ends: Sequence[float],
    title: str,
    unit: str,
    head: float = HEAD,
) -> Any:
    """Draws one group of bars per length, from the top, and names each bar on its left."""
    groups = [[r for r in results if r["seq_length"] == length] for length in lengths_of(results)]
    step = GAP / ROW
    inches = ROW * (sum(map(len, groups)) + step * len(groups))
    height = head + inches + FOOT
    figure = new_figure(height, title, wrap(describe_run(results), 122), size=8.5)
    axes = figure.add_axes((0.235, FOOT / height, 0.75, inches / height))
    limit = 1.02 * max(ends, default=1.0) or 1.0
    y, names = 0.0, {}
    for group in groups:
        axes.text(
            -0.3, y + 0.32, f"{group[0]['seq_length']:,} tokens", weight="bold", size=9.5,
            color=INK, va="center", transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        y += step
        for result in group:
            names[y] = result["mode"]
            if result["status"] == OK:
                bar(axes, y, result, limit)
            else:
                _words(axes, y, limit, describe_failure(result))
            y += 1
    axes.set_ylim(y - 0.4, -0.1)
    axes.set_xlim(0, ROOM * limit)
    axes.set_yticks(list(names), list(names.values()), size=9, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= limit])
    frame(axes, "bottom")
    axes.set_xlabel(unit, size=8.5, color=FAINT, loc="left")
    return figure


def _behind(axes: Any, x: float, y: float, value: str, ratio: str) -> None:
    text = axes.text(x, y, value, size=9, weight="bold", color=INK, va="center")
    axes.annotate(
        ratio, (1, 0.5), xycoords=text, xytext=(6, 0), textcoords="offset points", size=8.5,
        color=INK, va="center",
    )  # fmt: skip


def _words(axes: Any, y: float, limit: float, text: str) -> None:
    text = textwrap.shorten(text, 88, placeholder=" ...")
    axes.text(
        0.01 * limit, y, text, size=8.5, style="italic", color=FAINT, va="center", parse_math=False
    )
