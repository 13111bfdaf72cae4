"""The comparison picture: one horizontal bar of step time per row, with its spread and doubt.

How to read it, and how it is drawn: a bar ends at the median step time. Its first part is what the
baseline row needs too, the second, in the warning colour, is exposed communication. Small dots
are the raw steps, the line across them is the spread. Behind the bar stand the ratios; on the
right, where it is known, peak memory. A row that has no time says why, in words.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from ddp_by_hand.measure.bars import draw_steps, finish_bars, write_behind, write_reason
from ddp_by_hand.measure.picture import (
    INK,
    new_figure,
    save_picture,
    shorten,
    three_digits,
    wrap,
    write_key,
)
from ddp_by_hand.measure.results import OK
from ddp_by_hand.measure.statistics import summarize
from ddp_by_hand.measure.table import describe_failure

_FLOOR = "#8CC5E8"
_EXPOSED = "#D55E00"
_MEMORY = "#B8B8B8"

_ROW = 0.56  # inches for one row
_HEAD = 1.05  # inches above the first row: title, a line of subtitle, legend
_LINE = 0.16  # a further line of subtitle
_SUBTITLE_LENGTH = 112  # characters in a line of subtitle
_FOOT = 0.62  # inches below the last: the time axis
_TEXT_ROOM = 1.55  # width of the time axes in widths of the bars' region
_OFF_SCALE = "▸"


def draw_comparison(
    rows: Sequence[dict],
    path: str | Path,
    title: str,
    subtitle: str,
    baseline: str | None = None,
    reference: str | None = None,
) -> None:
    """Writes the picture of `rows`, in their order from the top, as a PNG to `path`, atomically.

    A row has `label`, `status` and `reason`; one that is ok has also `samples_ms` (steps),
    `exposed_ms` (or None), `ratio_to_baseline` and `ratio_to_reference` as (value, low, high) (or
    None), and `peak_memory_mb` (or None). `baseline` and `reference` are labels of rows; the
    baseline's median is drawn as a line behind all bars. Memory is in MiB.
    """
    lines = wrap(subtitle, _SUBTITLE_LENGTH, lines=3)
    figure, times, memory = _layout(rows, title, lines)
    limit = _time_limit(rows)
    for position, row in enumerate(rows):
        if _is_ok(row):
            end, beyond = _draw_bar(times, position, row, limit)
            _write_ratios(times, position, row, end + 0.012 * limit, beyond, baseline, reference)
            _draw_memory(memory, position, row)
        else:
            write_reason(times, position, limit, describe_failure(row))
    _finish_times(times, rows, limit)
    _finish_memory(memory, rows)
    floor = baseline if _draw_floor_line(times, rows, baseline) else None
    exposed = any(row.get("exposed_ms") is not None for row in rows)
    _write_key(figure, lines, floor, exposed)
    save_picture(figure, path, _sentence(floor, exposed, reference))


def _layout(rows: Sequence[dict], title: str, lines: list[str]):
    """Returns figure and axes; the memory axes are None if no row has its memory."""
    head = _HEAD + _LINE * max(0, len(lines) - 1)
    height = head + _ROW * max(1, len(rows)) + _FOOT
    figure = new_figure(height, title, lines)
    has_memory = any(_memory(row) is not None for row in rows)
    right = 0.83 if has_memory else 0.985
    bottom, top = _FOOT / height, 1 - head / height
    times = figure.add_axes((0.2, bottom, right - 0.2, top - bottom))
    memory = figure.add_axes((0.85, bottom, 0.135, top - bottom)) if has_memory else None
    return figure, times, memory


def _time_limit(rows: Sequence[dict]) -> float:
    """Returns the right end of the bars' region in ms, which single slow steps do not move."""
    ends = [np.quantile(row["samples_ms"], 0.95) for row in rows if _is_ok(row)]
    return 1.03 * float(max(ends, default=1.0))


def _draw_bar(axes, position: int, row: dict, limit: float) -> tuple[float, int]:
    """Draws the two parts of a bar, the raw steps as dots, the spread as a line.

    Returns where the row's last mark is, and how many steps lie beyond the limit.
    """
    step = summarize(row["samples_ms"])
    exposed = min(max(row.get("exposed_ms") or 0.0, 0.0), step.median)
    rest = step.median - exposed
    axes.barh(position, rest, height=0.62, color=_FLOOR)
    axes.barh(position, exposed, left=rest, height=0.62, color=_EXPOSED)
    last, beyond = draw_steps(axes, position, row["samples_ms"], limit)
    axes.plot([step.p10, step.p90], [position] * 2, "|-", color=INK, lw=1.3, ms=7, mew=1.3)
    return max(step.median, step.p90, last), beyond


def _write_ratios(axes, position, row, x, beyond, baseline, reference) -> None:
    """Writes median and ratios at the bar's end, right of every dot of the row."""
    to_baseline = _ratio_text(row.get("ratio_to_baseline"), baseline, row["label"])
    to_reference = _ratio_text(row.get("ratio_to_reference"), reference, row["label"], doubt=True)
    details = [to_baseline] if to_baseline else []
    details += [f"{_OFF_SCALE} {beyond}"] if beyond else []
    y = position - 0.16 if to_reference else position
    write_behind(axes, x, y, f"{three_digits(median(row['samples_ms']))} ms", "  ".join(details))
    axes.text(x, position + 0.2, to_reference, size=8.5, va="center", color=INK, parse_math=False)


def _ratio_text(ratio, other: str | None, label: str, doubt: bool = False) -> str:
    if ratio is None or other is None or other == label:
        return ""
    value, low, high = ratio
    interval = f" [{low:.2f}, {high:.2f}]" if doubt else ""
    return f"{value:.2f}× {shorten(_name(other), 12)}{interval}"


def _draw_memory(axes, position: int, row: dict) -> None:
    value = _memory(row)
    if axes is None or value is None:
        return
    axes.barh(position, value, height=0.62, color=_MEMORY)
    axes.text(
        value, position, f" {_bytes(value)}", size=8.5, va="center", color=INK, parse_math=False
    )


def _finish_times(axes, rows: Sequence[dict], limit: float) -> None:
    """Labels rows and time axis; the axis is wider than the bars, to leave room for the ratios."""
    note = "step time in ms: bar = median, dots = steps, |–| = 10th to 90th percentile"
    if any(max(row["samples_ms"]) > limit for row in rows if _is_ok(row)):
        note += f", {_OFF_SCALE} n = n slower steps off the scale"
    measured = any(_is_ok(row) for row in rows)
    finish_bars(axes, [row["label"] for row in rows], limit, _TEXT_ROOM, note if measured else "")
    if not measured:
        axes.set_xticks([])


def _finish_memory(axes, rows: Sequence[dict]) -> None:
    if axes is None:
        return
    limit = max(1.0, *(_memory(row) or 0.0 for row in rows))
    finish_bars(axes, [""] * len(rows), limit, 1.9, "peak memory")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _draw_floor_line(axes, rows: Sequence[dict], baseline: str | None) -> bool:
    """Draws the baseline's median behind all bars; returns whether there is one."""
    found = [row["samples_ms"] for row in rows if row["label"] == baseline and _is_ok(row)]
    if found:
        axes.axvline(median(found[0]), color=INK, lw=0.9, ls=(0, (4, 3)), zorder=0.5)
    return bool(found)


def _write_key(figure, lines: list[str], baseline: str | None, exposed: bool) -> None:
    """Writes the key of colours above the axes, at a fixed distance from the top."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    below = 0.6 + _LINE * max(0, len(lines) - 1)
    handles = []
    if exposed:
        handles += [
            Patch(color=_FLOOR, label="computation"),
            Patch(color=_EXPOSED, label=f"exposed communication{_minus(baseline)}"),
        ]
    if baseline is not None:
        name = f"{shorten(_name(baseline), 14)}: the floor"
        handles.append(Line2D([], [], color=INK, lw=0.9, ls=(0, (4, 3)), label=name))
    if handles:
        write_key(figure, handles, below, columns=3)


def _minus(baseline: str | None) -> str:
    """Returns how exposed communication was measured, for the legend."""
    return "" if baseline is None else f": step minus {shorten(_name(baseline), 14)}"


def _sentence(floor: str | None, exposed: bool, reference: str | None) -> str:
    """Returns the sentence that says what to read off."""
    parts = ["Shorter bars are faster, and dots far from a bar's end are steps that were disturbed"]
    if exposed:
        parts.append("the orange end of a bar is exposed communication, what communication adds")
    if floor is not None:
        parts.append(f"no bar can be expected to end left of the dashed line ({_name(floor)})")
    if reference is not None:
        parts.append("a ratio whose interval holds 1 shows no difference")
    return "; ".join(parts) + "."


def _is_ok(row: dict) -> bool:
    return row.get("status", OK) == OK


def _memory(row: dict) -> float | None:
    return row.get("peak_memory_mb") if _is_ok(row) else None


def _bytes(megabytes: float) -> str:
    return f"{megabytes:.0f} MiB" if megabytes < 1000 else f"{megabytes / 1024:.2f} GiB"


def _name(label: str) -> str:
    """Returns the name after the file in `path/to/file.py:Name`, and other labels unchanged."""
    return label.rpartition(":")[2] or label
