"""Draws rows of horizontal bars, and what stands beside them: at 0, 1, and so on, from the top."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_by_hand.measure.picture import FAINT, INK, frame, name_rows, wrap


def draw_steps(axes: Any, y: float, samples: Sequence[float], limit: float) -> tuple[float, int]:
    """Draws steps as dots. Returns the last one's place, and how many lie beyond the limit."""
    steps = np.asarray(samples, dtype=float)
    shown = steps[steps <= limit]
    jitter = np.random.default_rng(int(y)).uniform(-0.24, 0.24, shown.size)
    axes.plot(shown, y + jitter, "o", ms=2.6, mew=0.3, mec="white", color=INK)
    return float(shown.max(initial=0.0)), steps.size - shown.size


def write_behind(axes: Any, x: float, y: float, value: str, rest: str = "") -> None:
    """Writes a number behind a bar, and what it is relative to others behind that."""
    style = {"va": "center", "color": INK, "parse_math": False}
    number = axes.text(x, y, value, size=9.5, weight="bold", **style)
    axes.annotate(rest, (1, 0.5), xycoords=number, xytext=(6, 0), textcoords="offset points",
                  size=8.5, **style)  # fmt: skip


def write_reason(axes: Any, y: float, limit: float, reason: str) -> None:
    """Writes in place of a bar why there is none."""
    axes.text(0.012 * limit, y, "\n".join(wrap(reason)), size=9, style="italic", color=FAINT,
              va="center", parse_math=False,
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip


def finish_bars(axes: Any, names: Sequence[str], limit: float, room: float, label: str) -> None:
    """Names the rows and the axis, whose ticks end at the limit.

    `room`: the width of the axes, in limits. Text stands behind the bars.
    """
    axes.set(xlim=(0, room * limit), ylim=(max(1, len(names)) - 0.5, -0.5))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= limit])
    frame(axes, "bottom")
    name_rows(axes, names)
    axes.set_xlabel(label, size=8.5, color=FAINT, loc="left")
