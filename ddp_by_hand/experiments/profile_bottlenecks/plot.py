"""The picture of `experiments.profile_bottlenecks`: how each phase grows with the length.

Lengths and times are logarithmic: a straight line is a power of the length, its slope the exponent.
Memory is not: its axis begins at 0, so that heights are shares of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_by_hand.experiments.profile_bottlenecks.verdict import (
    PHASES,
    described,
    growths,
    headline,
    measured,
)
from ddp_by_hand.measure.growth import Growth
from ddp_by_hand.measure.picture import (
    FAINT,
    INK,
    Label,
    frame,
    new_figure,
    save_picture,
    three_digits,
    wrap,
    write_labels,
)

# phases that an ordinary step has too are grey
COLOURS = {
    "total": "#222222", "forward": "#777777", "first backward": "#777777", "optimizer": "#A0A0A0",
    "norms": "#D55E00", "coefficients": "#E69F00", "second backward": "#CC79A7", "sums": "#0072B2",
    "collectives": "#009E73", "noise": "#56B4E9",
}  # fmt: skip
DASHES = {"first backward": (0, (4, 2)), "optimizer": (0, (1, 1.5)), "memory": "-"}
MARKERS = {"first backward": "s", "optimizer": "D"}
HEIGHT = 6.6  # inches
SMALLEST = 0.002  # of the longest step: smaller phases are left out
TALL, LOW = 0.435, 0.19  # heights of the axes, in heights of the figure
SUBTITLE = 0.023  # height of a line of it, in heights of the figure


def draw(rows: Sequence[Mapping[str, Any]], limit_mb: float | None, path: Path) -> None:
    """Write the picture; at least one length must have been measured."""
    sentence = (
        "The highest coloured line at the right end is what privacy spends most on there; "
        "a line steeper than that of the total will overtake it as samples grow."
    )
    save_picture(figure_of(rows, limit_mb), path, sentence)


def figure_of(rows: Sequence[Mapping[str, Any]], limit_mb: float | None) -> Any:
    good, fits = measured(rows), growths(rows)
    title = "What a private step spends its time on, by length of the samples"
    subtitle = wrap(described(rows), 120, lines=4)
    figure = new_figure(HEIGHT, title, subtitle, size=8.5)
    below = 0.915 - SUBTITLE * (len(subtitle) - 1)
    answer = "\n".join(wrap(headline(rows, limit_mb), 120, lines=4))
    figure.text(0.012, below, answer, size=9.5, color=INK, va="top", parse_math=False)
    times = figure.add_axes((0.075, 0.335, 0.5, TALL))
    memory = figure.add_axes((0.075, 0.07, 0.5, LOW))
    _draw_times(times, good, fits)
    _draw_memory(memory, rows, good, fits, limit_mb)
    for axes in (times, memory):
        lengths = sorted({row["seq_length"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.12)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        frame(axes, "bottom", "left")
    memory.set_xlabel("tokens per sample", size=8.5, color=FAINT, loc="left")
    return figure


def _draw_times(axes: Any, good: Sequence[Mapping], fits: Mapping[str, Growth]) -> None:
    axes.set_yscale("log")
    lengths = [row["seq_length"] for row in good]
    labels = []
    floor = SMALLEST * good[-1]["median_time_ms"]
    for name in ("total", *PHASES):
        ys = [r["median_time_ms"] if name == "total" else r["phases_ms"].get(name) for r in good]
        points = [(x, y) for x, y in zip(lengths, ys, strict=True) if y]
        if not points or points[-1][1] < floor:
            continue
        colour = COLOURS[name]
        axes.plot(*zip(*points, strict=True), MARKERS.get(name, "o"), ms=5, color=colour, mew=0)
        growth = fits.get(name)
        if growth is not None:
            ends = lengths[0], lengths[-1]
            axes.plot(ends, [growth.at(x) for x in ends], color=colour, ls=DASHES.get(name, "-"),
                      lw=2.2 if name == "total" else 1.4)  # fmt: skip
        text = f"{name} {three_digits(points[-1][1])} ms"
        more = "" if growth is None else str(growth)
        labels.append(Label(*points[-1], text, colour, more=more))
    _tick(axes)
    axes.set_ylabel("ms per step", size=8.5, color=FAINT)
    axes.set_title(
        "Time: points measured, lines fitted; grey is as without privacy",
        size=8.5, color=FAINT, loc="left",
    )  # fmt: skip
    axes.text(1.06, 1.03, "at the longest", size=8.5, color=FAINT, transform=axes.transAxes)
    axes.text(1.48, 1.03, "grows as [95 % interval]", size=8.5, color=FAINT,
              transform=axes.transAxes)  # fmt: skip
    axes.grid(axis="y", color="#E6E6E6", lw=0.6)
    axes.set_axisbelow(True)
    write_labels(axes, labels)


def _tick(axes: Any) -> None:
    """Sets ticks at powers of ten or, where those are few, at 1, 2 and 5 times them."""
    low, high = axes.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5)):
        ticks = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(ticks) > 2:
            break
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)


def _draw_memory(axes: Any, rows, good, fits: Mapping[str, Growth], limit_mb) -> None:
    from matplotlib.ticker import MaxNLocator

    known = [(r["seq_length"], r["peak_memory_mb"] / 1024) for r in good if r["peak_memory_mb"]]
    limit = (limit_mb or good[-1]["device_memory_mb"] or 0) / 1024
    if known:
        axes.plot(*zip(*known, strict=True), "o-", ms=5, color=COLOURS["total"], lw=1.4)
    heights = [y for _, y in known] + ([limit] if limit else [])
    if heights:
        axes.set_ylim(0, 1.25 * max(heights))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter("{x:g}")
    if known:
        fit = fits.get("memory")
        text = f"peak {known[-1][1]:.2f} GiB"
        more = "" if fit is None else str(fit)
        write_labels(axes, [Label(*known[-1], text, INK, more=more)])
    if limit:
        axes.axhline(limit, color=COLOURS["norms"], lw=1.2, ls=(0, (4, 3)))
        axes.text(0.01, limit, f" limit {limit:.3g} GiB", size=8.5, color=COLOURS["norms"],
                  va="bottom", transform=axes.get_yaxis_transform())  # fmt: skip
    for row in rows:
        if row["status"] != "ok":
            axes.text(row["seq_length"], 0.12, row["status"], size=8.5, style="italic", color=FAINT,
                      ha="center", transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_ylabel("GiB", size=8.5, color=FAINT)
    axes.set_title(_memory_title(good), size=8.5, color=FAINT, loc="left")


def _memory_title(good: Sequence[Mapping]) -> str:
    what = "" if good[-1]["device_type"] == "cuda" else " (resident, with Python and libraries)"
    return f"Peak memory of the largest rank{what}"
