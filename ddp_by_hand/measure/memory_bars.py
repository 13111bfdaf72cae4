"""The memory picture: two stacked horizontal bars per variant, by kind, and what was measured.

How to read it: the upper bar is the predicted peak of a rank, cut into what is allocated at that
moment. At the peak there may be no gradients yet, so the thin bar below it is what the rank holds
after backward. The dark line across the upper bar's end is the measured peak. Behind it stand the
measured peak and how far the prediction is off. Without a measured peak there stands the predicted
one, in grey.
"""

from collections.abc import Sequence
from pathlib import Path

from ddp_by_hand.measure.bars import finish_bars
from ddp_by_hand.measure.picture import FAINT, INK, new_figure, save_picture, wrap, write_key

COLOURS = {
    "parameters": "#0072B2", "gradients": "#56B4E9", "optimizer": "#00664B",
    "activations": "#F0C05A", "buffers": "#CC79A7",
}  # fmt: skip
_NAMES = {
    "optimizer": "optimizer state",
    "buffers": "buffers: buckets, what is gathered or on the wire",
}
_ROW, _HEAD, _FOOT, _LINE = 0.46, 1.0, 0.6, 0.16  # inches
_TEXT_ROOM = 1.5  # width of the axes in widths of the longest bar


def draw_memory(rows: Sequence[dict], path: Path, title: str, notes: Sequence[str]) -> None:
    """Writes the picture of `rows`, in their order from the top, as a PNG to `path`, atomically.

    A row has `label`, `kinds` (kind -> predicted MiB at the peak), `later` (the same after
    backward), `measured` (MiB or None) and `reason`, which
    says why nothing was measured (or None). `notes` are the lines below the title.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines = [line for note in notes for line in wrap(note, 112, lines=3)]
    head = _HEAD + _LINE * max(0, len(lines) - 1)
    height = head + _ROW * len(rows) + _FOOT
    figure = new_figure(height, title, lines)
    axes = figure.add_axes((0.2, _FOOT / height, 0.785, (height - head - _FOOT) / height))
    ends = [max(sum(row["kinds"].values()), row["measured"] or 0.0) for row in rows]
    scale, unit = (1024, "GiB") if max(ends) >= 1024 else (1, "MiB")
    limit = max(ends) / scale
    for position, (row, end) in enumerate(zip(rows, ends, strict=True)):
        left = _stack(axes, position - 0.1, 0.44, row["kinds"], scale)
        _stack(axes, position + 0.26, 0.18, row["later"], scale)
        measured = row["measured"]
        if measured is not None:
            axes.plot([measured / scale] * 2, [position - 0.38, position + 0.18], color=INK, lw=2)
        text, weight = _beside(left, measured, scale, unit, row["reason"])
        axes.text(end / scale + 0.012 * limit, position, text, size=8.8, va="center", weight=weight,
                  color=FAINT if measured is None else INK, parse_math=False)  # fmt: skip
    finish_bars(
        axes, [row["label"] for row in rows], limit, _TEXT_ROOM,
        f"{unit} on a rank, predicted: upper bar = at the peak; thin bar = after backward, when "
        "all gradients are there",
    )  # fmt: skip
    handles = [Patch(color=c, label=_NAMES.get(kind, kind)) for kind, c in COLOURS.items()]
    is_measured = any(row["measured"] is not None for row in rows)
    if is_measured:
        handles.append(Line2D([], [], color=INK, lw=2, label="measured"))
    write_key(figure, handles, head - 0.4, columns=6, handlelength=1.1, columnspacing=1.2,
              handletextpad=0.5)  # fmt: skip
    sentence = (
        "Upper bars are what is allocated at the predicted peak of a step, thin ones what is held "
        "after backward; sharding shortens them"
    )
    if is_measured:
        sentence += "; an upper bar should end at the dark line, which is the measured peak"
    save_picture(figure, path, f"{sentence}.")


def _stack(axes, y: float, height: float, kinds: dict[str, float], scale: float) -> float:
    """Draws the kinds of one moment; returns where the bar ends."""
    left = 0.0
    for kind, colour in COLOURS.items():
        size = kinds[kind] / scale
        axes.barh(y, size, left=left, height=height, color=colour, ec="white", lw=0.4)
        left += size
    return left


def _beside(
    predicted: float, measured: float | None, scale: float, unit: str, reason: str | None
) -> tuple[str, str]:
    """Returns the text behind a bar and its weight."""
    if measured is None:
        because = "" if reason is None else f", {wrap(reason, 24, lines=1)[0]}"
        return f"{_number(predicted)} {unit}{because}", "normal"
    off = predicted * scale / measured - 1
    return f"measured {_number(measured / scale)} {unit}, predicted {off:+.1%}", "bold"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
