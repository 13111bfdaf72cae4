"""The picture of the budgets: one bar per implementation, cut into what its time went into."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_by_hand.measure.picture import (
    INK,
    WIDTH,
    frame,
    new_figure,
    save_picture,
    write_key,
    write_note,
)

from .budget import NOT_TOLD_APART, Budget, less_computed, tells_added
from .timeline import COMPUTATION, EXPOSED, WAITING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {  # part: colour, hatch, what it is, colour of a number in it
    "computation": (COMPUTATION, "", "computation", "white"),
    "contention": ("#E69F00", "", "contention: the same kernels take longer", INK),
    "added": ("#F0E442", "", "added kernels, as copies into buckets", INK),
    "exposed": (EXPOSED, "/////", "exposed communication", "white"),
    "waiting": (WAITING, "....", "waiting for a slower rank", INK),
    "idle": ("#F1F1F1", "", "idle: nothing runs", INK),
}
SENTENCE = (
    "A bar is a step, cut into what its time went into: what lies right of the dashed line is what "
    "communication costs, and the colours say how."
)
ROW, HEAD, FOOT, LINE = 0.42, 0.98, 1.08, 0.135  # inches; a further line of the note
AXIS = 0.65  # of the figure's width
CHARACTER, MARGIN = 5.1, 3.0  # points: a number that is wider than its part is left out


def draw_budgets(found: Mapping[str, Budget], path: str | Path, title: str, basis: str) -> None:
    """Draws the budgets, from the top in their order, on one axis."""
    save_picture(budget_figure(found, title, basis), path, SENTENCE)


def budget_figure(found: Mapping[str, Budget], title: str, basis: str) -> Figure:
    """Returns the figure of `draw_budgets`, not saved.

    Raises:
        ValueError: if there is nothing to draw.
    """
    if not found:
        raise ValueError("draw_budgets: no budget; profile none beside the others")
    note = _note(found, basis)
    foot = FOOT + LINE * max(0, len(note) - 3)
    height = HEAD + ROW * len(found) + foot
    figure = new_figure(height, title, [])
    longest = max(one.step for one in found.values()) / 1000
    area = (0.2, foot / height, _axis(longest), ROW * len(found) / height)
    axes = figure.add_axes(area)
    shown = _shown(found, basis)
    for row, one in enumerate(found.values()):
        _draw_bar(axes, -row, one, shown, longest)
    _finish(axes, found, longest)
    _write_words(figure, shown, note)
    return figure


def _axis(longest: float) -> float:
    """Returns the axis' part of the width: less where steps have more digits beside their bars."""
    return AXIS - 0.01 * max(0, len(f"{longest:.1f}") - 5)


def _shown(found: Mapping[str, Budget], basis: str) -> list[str]:
    """Lists the parts that occur: a key to what is not there would be searched for."""
    return [
        part
        for part in STYLES
        if any(one.parts()[part] > 0 for one in found.values())
        and (part != "added" or tells_added(basis))
    ]


def _draw_bar(axes: Axes, y: float, one: Budget, shown: list[str], longest: float) -> None:
    left = 0.0
    for part in shown:
        width = one.parts()[part] / 1000
        colour, hatch, _, ink = STYLES[part]
        axes.barh(
            y, width, 0.72, left, color=colour, hatch=hatch, edgecolor="white",
            linewidth=0.0 if hatch else 0.6,
        )  # fmt: skip
        number = f"{width:.1f}"
        room = width / longest * _axis(longest) * WIDTH * 72  # points
        if room > CHARACTER * len(number) + MARGIN:
            text = axes.text(
                left + width / 2, y, number, ha="center", va="center", fontsize=8,
                color=ink,
            )  # fmt: skip
            if hatch:
                text.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1.2})
        left += width


def _finish(axes: Axes, found: Mapping[str, Budget], longest: float) -> None:
    for row, one in enumerate(found.values()):
        ratio = "floor" if one.is_floor else f"{one.step / one.floor:.3f} ×"
        axes.annotate(
            f"{one.step / 1000:.1f} ms   {ratio}",
            (1, -row), xytext=(6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=9, color=INK,
        )  # fmt: skip
    for floor in {one.floor for one in found.values()}:
        axes.axvline(floor / 1000, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xlim(0, longest * 1.005)
    axes.set_ylim(-len(found) + 0.5, 0.5)
    axes.set_yticks([-row for row in range(len(found))], [_broken(name) for name in found])
    frame(axes, "bottom")
    axes.tick_params(labelsize=9, length=0, axis="y")
    axes.set_xlabel("milliseconds per step", fontsize=9)


def _broken(name: str) -> str:
    """Breaks a long name before its option: `ddp_bucketed+find_unused_parameters`."""
    return name.replace("+", "\n+") if len(name) > 20 else name


def _write_words(figure: Figure, shown: list[str], note: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=STYLES[p][0], hatch=STYLES[p][1], edgecolor="white", label=STYLES[p][2])
        for p in shown
    ]
    write_key(figure, handles, 0.34, columns=3)
    write_note(figure, "\n".join(note))


def _note(found: Mapping[str, Budget], basis: str) -> list[str]:
    """Returns the lines below the axis: what the parts are, and where they mislead."""
    note = (
        "A bar is a step. Computation: up to that of the same step without communication, the "
        "floor. Contention: what kernels take beyond that. The dashed line is the floor's step."
        + ("" if tells_added(basis) else f" Here {NOT_TOLD_APART}.")
        + f" Measured from {basis} under the profiler, means over ranks and steps; for step times "
        "use the benchmark's table. " + " ".join(less_computed(found))
    )
    return textwrap.wrap(note, 128)
