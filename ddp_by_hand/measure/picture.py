"""Gives all pictures one look, and the sentence to read off them.

The sentence travels in the PNG itself, in the text entry `Description`: whoever shows the picture,
a report or a viewer of images, needs no other source. Colours of pictures are Okabe and Ito's, for
colour-blind readers; those of one picture also differ in lightness, or by line or marker.
"""

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ddp_by_hand.measure.files import write_atomically

INK, FAINT = "#222222", "#6B6B6B"
WIDTH, DPI = 9.0, 200  # inches; 1800 pixels, shown at 900 in a README
LABEL_LENGTH = 23  # characters; about what fits to the left of bars
LINE, COLUMNS = 0.2, (1.06, 1.48)  # of labels right of axes: inches, and widths of the axes
_ENTRY = "Description"


@dataclass(frozen=True)
class Picture:
    """A PNG file: its bytes, its size in pixels, and its sentence (empty if it has none)."""

    data: bytes
    width: int
    height: int
    description: str


def save_picture(figure: Any, path: str | Path, description: str) -> None:
    """Writes a matplotlib figure as a PNG with its sentence, atomically; makes missing folders."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={_ENTRY: description})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def new_figure(
    height: float, title: str, lines: Sequence[str], size: float = 9, width: float = WIDTH
) -> Any:
    """Returns a figure of so many inches, with its title and the lines below it, of that size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    style = {"x": 0.012, "ha": "left", "va": "top", "parse_math": False}
    figure.text(y=1 - 0.1 / height, s=title, size=13, weight="bold", color=INK, **style)
    figure.text(y=1 - 0.38 / height, s="\n".join(lines), size=size, color=FAINT, **style)
    return figure


def write_key(figure: Any, handles: Sequence, below: float, columns: int, **more: Any) -> None:
    """Writes a figure's key, so many inches below its top; `more` are `legend`'s arguments."""
    style = {"frameon": False, "fontsize": 8.8, "handlelength": 1.5, "columnspacing": 1.4}
    figure.legend(
        handles=handles, ncols=columns, loc="upper left",
        bbox_to_anchor=(0.004, 1 - below / figure.get_figheight()), **style | more,
    )  # fmt: skip


def write_note(figure: Any, note: str) -> None:
    """Writes a note at the bottom of a figure."""
    figure.text(0.012, 0.06 / figure.get_figheight(), note, size=8, va="bottom", color=FAINT)


def frame(axes: Any, *sides: str) -> None:
    """Draws the frame of the axes on these sides only, in grey."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in sides)
        axes.spines[side].set_color(FAINT)
    axes.tick_params(labelsize=8.5, color=FAINT, labelcolor=INK)


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Writes the names of rows, which are at 0, 1, and so on, to the left of the axes."""
    axes.set_yticks(range(len(names)), [label_of(name) for name in names])
    for tick in axes.get_yticklabels():
        tick.set(size=9, parse_math=False)
    axes.tick_params(axis="y", length=0)


def three_digits(value: float) -> str:
    """Formats a number with three digits that count: 755, 62.0, 0.63."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def apart(
    points: Sequence[float], distance: float, low: float = -inf, high: float = inf
) -> list[float]:
    """Spreads ascending positions to a minimal distance, between `low` and `high`.

    Each crowded group keeps its middle, where there is room.
    """

    def middle(group: Sequence[float]) -> float:
        half = distance * (len(group) - 1) / 2
        return max(min(sum(group) / len(group), high - half), low + half)

    groups: list[list[float]] = []
    for point in points:
        groups.append([point])
        while (
            len(groups) > 1
            and middle(groups[-1]) - middle(groups[-2])
            < distance * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [
        middle(group) + distance * (n - (len(group) - 1) / 2)
        for group in groups
        for n in range(len(group))
    ]


class Label(NamedTuple):
    """The label of a point (x, y) in data coordinates, to the right of the axes.

    Attributes:
        marker: the point's, which stands before the text in place of a line to the point.
        more: text of a second column.
    """

    x: float
    y: float
    text: str
    colour: str
    marker: str = ""
    more: str = ""


def write_labels(axes: Any, labels: Sequence[Label], notes: Sequence[str] = ()) -> None:
    """Writes labels beside their points, at least a line apart, and notes below them."""
    inches = axes.get_position().height * axes.figure.get_figheight()
    line = min(LINE / inches, 1 / (len(labels) + len(notes) + 1))
    labels = sorted(labels, key=lambda label: label.y)
    on_screen = axes.transData.transform([(label.x, label.y) for label in labels] or [(1, 1)])
    points = axes.transAxes.inverted().transform(on_screen)[: len(labels), 1]
    lowest = line * (len(notes) + 0.4) if notes else 0.0
    first, second = COLUMNS
    for label, y in zip(labels, apart(points, line, lowest, 1 - line / 2), strict=True):
        style = {"size": 8.5, "color": label.colour, "va": "center", "transform": axes.transAxes}
        if label.marker:
            axes.plot(first, y, label.marker, ms=6, color=label.colour, clip_on=False,
                      transform=axes.transAxes)  # fmt: skip
        else:
            leader = {"arrowstyle": "-", "color": label.colour, "lw": 0.6, "alpha": 0.6,
                      "shrinkA": 2, "shrinkB": 4}  # fmt: skip
            axes.annotate("", label[:2], (first, y), textcoords=axes.transAxes, arrowprops=leader,
                          annotation_clip=False)  # fmt: skip
        axes.text(first + 0.03 * bool(label.marker), y, label.text, **style)
        axes.text(second, y, label.more, **style)
    for n, note in enumerate(reversed(notes)):
        axes.text(first, line * (n + 0.4), note, size=8.5, style="italic", color=FAINT,
                  va="center", transform=axes.transAxes)  # fmt: skip


def label_of(label: str) -> str:
    """Breaks `file.py:Name` after a colon and `NAME+OPTION` before a plus.

    Each line is shortened in its middle.
    """
    lines = [""]
    for piece in re.split(r"(?<=:)|(?=\+)", label):
        if lines[-1] and len(lines[-1] + piece) > LABEL_LENGTH:
            lines.append("")
        lines[-1] += piece
    return "\n".join(shorten(line, LABEL_LENGTH) for line in lines)


def shorten(text: str, length: int) -> str:
    """Replaces the middle of a text that is longer than `length` characters by an ellipsis."""
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    tail = length * 2 // 3
    return f"{text[: length - tail - 1]}…{text[-tail:]}"


def wrap(text: str, length: int = 84, lines: int = 2) -> list[str]:
    """Breaks a text into at most so many lines of so many characters."""
    return textwrap.wrap(text, length, max_lines=lines, placeholder=" …")


def read_picture(path: str | Path) -> Picture:
    """Reads a PNG file; raises ValueError if it is not a whole one."""
    from PIL import Image

    data = Path(path).read_bytes()
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()
            text = str(image.info.get(_ENTRY, ""))
            return Picture(data, image.width, image.height, text)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not a whole PNG ({error})") from None
