"""The four pictures of `experiments.llama_fsdp`, from its results.

| file | question |
| --- | --- |
| memory_comparison | how much memory does a mode need, at each length? |
| time_comparison | how long is a step, and what part of it is noise and AdamW? |
| memory_vs_time_tradeoff | what does a mode pay in one for the other? |
| overhead_analysis | how does the price over `no_dp` change with the length? |

Every mark is labelled where it stands. A cell that failed says so in words.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.llama_fsdp_results import (
    BASELINE,
    MODES,
    baseline_of,
    describe_run,
    good_rounds,
    lengths_of,
    memory_ratio,
    time_ratio,
)
from measure import OK, describe_failure
from measure.picture import save_picture

SENTENCES = {
    "memory_comparison": f"Of bars of one length, what one is longer than that of {BASELINE} is "
    "memory that the mode costs.",
    "time_comparison": "The coloured part of a bar is forward, backward, clipping and exchange, "
    f"the grey end noise and AdamW: a mode is cheap where both end near those of {BASELINE}.",
    "memory_vs_time_tradeoff": "A point left of and below another is better in both; one near the "
    f"crossing of the dashed lines costs hardly more than {BASELINE}.",
    "overhead_analysis": "A line that falls towards 1 is a price that longer samples pay off, a "
    "level one is paid at every length; intervals that overlap show no difference between modes.",
}
"""What to read off each, for those who show it."""

# Okabe and Ito's colour-blind safe palette
COLOURS = {
    "no_dp": "#6B6B6B",
    "ghost_fsdp": "#E69F00",
    "flash_fsdp": "#D55E00",
    "bookkeeping_fsdp": "#56B4E9",
    "flash_bookkeeping_fsdp": "#0072B2",
}
INK, FAINT, LATER = "#222222", "#6B6B6B", "#D9D9D9"
WIDTH, DPI = 9.0, 200  # inches; dots an inch
HEAD, KEY, FOOT = 0.66, 0.26, 0.6  # inches above and below the axes; of a legend
ROW, GAP = 0.34, 0.42  # inches: of a bar, and between the lengths
ROOM = 1.5  # width of the axes in widths of the longest bar: text stands behind bars
COLUMN = 1.06  # where labels begin, in widths of the axes that hold the points


def draw(results: Sequence[dict], folder: Path) -> list[Path]:
    """Write all four; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "memory_comparison": draw_memory,
        "time_comparison": draw_time,
        "memory_vs_time_tradeoff": draw_tradeoff,
        "overhead_analysis": draw_overhead,
    }
    paths = [folder / f"{name}.png" for name in pictures]
    for path, make in zip(paths, pictures.values(), strict=True):
        save_picture(make(results), path, SENTENCES[path.stem])
    return paths


# ---- bars ----------------------------------------------------------------------------------------


def draw_memory(results: Sequence[dict]) -> Any:
    def bar(axes: Any, y: float, r: dict, limit: float) -> None:
        value, against = r["peak_memory_gb"], memory_ratio(r, baseline_of(results, r["seq_length"]))
        if value is None:
            _words(axes, y, limit, "memory is not known on this system")
            return
        axes.barh(y, value, height=0.7, color=COLOURS[r["mode"]])
        ratio = "" if against is None or r["mode"] == BASELINE else f"{against:.2f}x {BASELINE}"
        _behind(axes, value + 0.012 * limit, y, f"{value:.2f} GiB", ratio)

    what = _memory_kind(results)
    return _bars(
        results, bar, [r["peak_memory_gb"] or 0.0 for r in results if r["status"] == OK],
        "Peak memory of each mode", f"GiB {what}, of the largest rank, after warm-up",
    )  # fmt: skip


def draw_time(results: Sequence[dict]) -> Any:
    def bar(axes: Any, y: float, r: dict, limit: float) -> None:
        part, median = r["phases"]["forward_backward_ms"], r["median_time_ms"]
        part = min(part, median)
        axes.barh(y, part, height=0.7, color=COLOURS[r["mode"]])
        axes.barh(y, median - part, left=part, height=0.7, color=LATER)
        steps = np.array([x for one in good_rounds(r).values() for x in one["step_ms"]])
        shown = steps[steps <= max(median, 1.02 * r["p90_time_ms"])]
        jitter = np.random.default_rng(0).uniform(-0.22, 0.22, shown.size)
        axes.plot(shown, y + jitter, ".", ms=3, mew=0, color=INK, alpha=0.6)
        found = time_ratio(r, baseline_of(results, r["seq_length"]))
        ratio = ""
        if found is not None and r["mode"] != BASELINE:
            ratio = f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]"
        end = max(median, float(shown.max(initial=0.0)))
        beyond = f" (+{steps.size - shown.size} slower)" if shown.size < steps.size else ""
        _behind(axes, end + 0.012 * limit, y, f"{_short(median)} ms", ratio + beyond)

    ends = [
        end for r in results if r["status"] == OK for end in (r["median_time_ms"], r["p90_time_ms"])
    ]
    figure = _bars(
        results, bar, ends, "Time of a step in each mode",
        f"ms a step of the slowest rank; bar: median, dots: steps; then the ratio to {BASELINE} "
        "[95 % interval]",
        head=HEAD + KEY,
    )  # fmt: skip
    _key(figure, [
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
    """A group of bars for each length, from the top, each bar named on its left."""
    groups = [[r for r in results if r["seq_length"] == length] for length in lengths_of(results)]
    step = GAP / ROW
    inches = ROW * (sum(map(len, groups)) + step * len(groups))
    figure, height = _figure(head + inches + FOOT, title, describe_run(results))
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
    _plain(axes, ["bottom"])
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


# ---- memory against time -------------------------------------------------------------------------


def draw_tradeoff(results: Sequence[dict]) -> Any:
    """One panel a length: left is faster, down is smaller; lines mark `no_dp`."""
    lengths = lengths_of(results)
    panel, between = 2.35, 0.62  # inches
    inches = len(lengths) * (panel + between) - between
    figure, height = _figure(
        HEAD + KEY + inches + FOOT, "What each mode pays in memory and in time",
        describe_run(results),
    )  # fmt: skip
    for number, length in enumerate(lengths):
        bottom = FOOT + (len(lengths) - 1 - number) * (panel + between)
        axes = figure.add_axes((0.085, bottom / height, 0.5, panel / height))
        own = [r for r in results if r["seq_length"] == length]
        _points(axes, own, baseline_of(results, length))
        axes.set_title(f"{length:,} tokens", size=9.5, weight="bold", color=INK, loc="left")
        if number == len(lengths) - 1:
            axes.set_xlabel(
                "ms a step (median); bars: 10th to 90th percentile. Left is faster, down is "
                f"smaller; dashed: {BASELINE}",
                size=8.5, color=FAINT, loc="left",
            )  # fmt: skip
        axes.set_ylabel(f"GiB {_memory_kind(results)}", size=8.5, color=FAINT)
    return figure


def _points(axes: Any, results: Sequence[dict], base: dict | None) -> None:
    good = [r for r in results if r["status"] == OK and r["peak_memory_gb"] is not None]
    labels = []
    for r in good:
        x, y = r["median_time_ms"], r["peak_memory_gb"]
        colour = COLOURS[r["mode"]]
        axes.plot([r["p10_time_ms"], r["p90_time_ms"]], [y, y], color=colour, lw=1.2)
        axes.plot(x, y, "o", ms=7, color=colour)
        found, memory = time_ratio(r, base), memory_ratio(r, base)
        ratios = "" if r is base or found is None else f"  {found.value:.2f}x time"
        ratios += "" if r is base or memory is None else f", {memory:.2f}x memory"
        labels.append((x, y, r["mode"] + ratios, colour))
    failed = [r for r in results if r not in good]
    if good:
        xs = [x for r in good for x in (r["p10_time_ms"], r["p90_time_ms"])]
        _range(axes.set_xlim, xs)
        _range(axes.set_ylim, [r["peak_memory_gb"] for r in good])
        if base is not None and base["peak_memory_gb"] is not None:
            dashes = {"color": FAINT, "lw": 0.8, "ls": (0, (4, 3)), "zorder": 0.5}
            axes.axvline(base["median_time_ms"], **dashes)
            axes.axhline(base["peak_memory_gb"], **dashes)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    _plain(axes, ["bottom", "left"])
    _column(axes, labels, [f"{r['mode']}: {r['status']}" for r in failed])


def _range(setter: Callable[[float, float], Any], values: Sequence[float]) -> None:
    """Room around the points: a third of their extent, or of a tenth of their size."""
    low, high = min(values), max(values)
    room = 0.3 * max(high - low, 0.1 * high)
    setter(max(0.0, low - room), high + room)


def _column(
    axes: Any, labels: Sequence[tuple[float, float, str, str]], notes: Sequence[str] = ()
) -> None:
    """Labels (x, y, text, colour) right of the axes, at least a line apart, tied to their points.

    Notes stand below them.
    """
    count = len(labels) + len(notes)
    if not count:
        return
    line = min(0.105, 1.0 / (count + 1))
    low, high = axes.get_ylim()
    ordered = sorted(labels, key=lambda label: label[1])
    heights: list[float] = []
    floor = line * (len(notes) + 0.4) if notes else 0.0
    for _, y, _, _ in ordered:
        heights.append(max((y - low) / (high - low), heights[-1] + line if heights else floor))
    over = max(0.0, heights[-1] - (1 - line / 2)) if heights else 0.0
    for i in range(len(heights) - 1, -1, -1):  # push down what has been pushed over the top
        top = heights[i + 1] - line if i + 1 < len(heights) else 1 - line / 2
        heights[i] = min(heights[i], top) if over else heights[i]
    place = axes.transAxes
    for (x, y, text, colour), height in zip(ordered, heights, strict=True):
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


# ---- ratios over the lengths ---------------------------------------------------------------------


def draw_overhead(results: Sequence[dict]) -> Any:
    """Ratios to `no_dp`: of the step, of forward and backward alone, of memory."""
    lengths = lengths_of(results)
    panels = [
        ("Complete step", "step_ms"),
        ("Forward and backward, with clipping and exchange", "forward_backward_ms"),
        ("Peak memory", None),
    ]
    panel, between = 2.1, 0.62
    inches = len(panels) * (panel + between) - between
    figure, height = _figure(
        HEAD + KEY + inches + FOOT, f"The price of privacy: each mode over {BASELINE}",
        describe_run(results),
    )  # fmt: skip
    for number, (title, key) in enumerate(panels):
        bottom = FOOT + (len(panels) - 1 - number) * (panel + between)
        axes = figure.add_axes((0.085, bottom / height, 0.58, panel / height))
        _curves(axes, results, lengths, key)
        axes.set_title(title, size=9.5, weight="bold", color=INK, loc="left")
        axes.set_ylabel(f"times {BASELINE}", size=8.5, color=FAINT)
        if number == len(panels) - 1:
            axes.set_xlabel(
                f"tokens a sample; bars: 95 % interval of the ratio; dashed: {BASELINE}",
                size=8.5, color=FAINT, loc="left",
            )  # fmt: skip
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
    _range(axes.set_ylim, values)
    _plain(axes, ["bottom", "left"])
    missing = [n for n in lengths if baseline_of(results, n) is None]
    if missing:
        notes.append(f"no {BASELINE} to compare with at {', '.join(map(str, missing))}")
    _column(axes, labels, notes)


def _against(result: dict, results: Sequence[dict], key: str | None) -> tuple:
    """Ratio, low, high; None where there is none."""
    base = baseline_of(results, result["seq_length"])
    if result["status"] != OK:
        return None, None, None
    if key is None:
        value = memory_ratio(result, base)
        return value, value, value
    found = time_ratio(result, base, key)
    return (None, None, None) if found is None else (found.value, found.low, found.high)


# ---- what all share ------------------------------------------------------------------------------


def _figure(height: float, title: str, subtitle: str) -> tuple[Any, float]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    style = {"x": 0.012, "ha": "left", "va": "top", "parse_math": False}
    figure.text(y=1 - 0.1 / height, s=title, size=13, weight="bold", color=INK, **style)
    lines = "\n".join(textwrap.wrap(subtitle, 122, max_lines=2, placeholder=" ..."))
    figure.text(y=1 - 0.37 / height, s=lines, size=8.5, color=FAINT, **style)
    return figure, height


def _key(figure: Any, entries: Sequence[tuple[str, list[str]]]) -> None:
    """What colours mean, below the subtitle; an entry may have several."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    figure.legend(
        [tuple(Patch(color=colour) for colour in colours) for _, colours in entries],
        [text for text, _ in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper left", bbox_to_anchor=(0.004, 1 - 0.58 / figure.get_figheight()), ncols=2,
        frameon=False, fontsize=8.5, handlelength=2.4, columnspacing=2.5,
    )  # fmt: skip


def _plain(axes: Any, spines: Sequence[str]) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in spines)
        axes.spines[side].set_color(FAINT)
    axes.tick_params(labelsize=8.5, color=FAINT, labelcolor=INK)


def _memory_kind(results: Sequence[dict]) -> str:
    return "allocated" if any(r["num_gpus"] for r in results) else "resident"


def _short(value: float) -> str:
    """Three digits that count: 755, 62.0, 0.63."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
