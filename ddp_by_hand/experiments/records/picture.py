"""Draws accuracy over ε: what was trained here, and what was published."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_by_hand.experiments.records.rows import ROWS, Row
from ddp_by_hand.measure import OK
from ddp_by_hand.measure.curves import COLOURS
from ddp_by_hand.measure.picture import FAINT, frame, new_figure, save_picture

DATA = "fashion-mnist"
MARKS = "osD^vP"
APART = 1.03  # methods at one ε stand beside each other, a factor each
SUBTITLE = "mean and deviation over seeds; crosses: published; rows of one ε stand side by side"
TITLE = "Accuracy on Fashion-MNIST over ε"


def draw(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes the picture of this package's records of Fashion-MNIST.

    Raises ValueError if there are none.
    """
    methods: dict[str, list[tuple[Row, list[float]]]] = {}
    for row in sorted((one for one in ROWS if isinstance(one, Row)), key=lambda one: one.epsilon):
        scores = [
            one["score"] for one in records
            if (one["row"], one["variant"], one["status"]) == (row.name, "ours", OK)
        ]  # fmt: skip
        if row.data == DATA and scores:
            methods.setdefault(row.method, []).append((row, scores))
    if not methods:
        raise ValueError("no records of Fashion-MNIST to draw: the table has none that was trained")
    figure = new_figure(4.6, TITLE, [SUBTITLE])
    axes = figure.subplots()
    figure.subplots_adjust(left=0.07, right=0.74, top=0.83, bottom=0.12)
    for place, (method, points) in enumerate(methods.items()):
        beside = APART ** (place - (len(methods) - 1) / 2)
        budgets = [beside * row.epsilon for row, _ in points]
        spread = [statistics.stdev(s) if len(s) > 1 else 0.0 for _, s in points]
        axes.errorbar(budgets, [statistics.mean(s) for _, s in points], spread, capsize=2, lw=1.4,
                      marker=MARKS[place % len(MARKS)], ms=4, label=method,
                      color=COLOURS[place % len(COLOURS)])  # fmt: skip
        for row, _ in points:
            if row.published is not None:
                axes.plot(beside * row.epsilon, row.published, "x", ms=8, mew=2,
                          color=COLOURS[place % len(COLOURS)])  # fmt: skip
    budgets = sorted({row.epsilon for points in methods.values() for row, _ in points})
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel("ε at δ = 1e-5; smaller is more private", color=FAINT, size=9)
    axes.set_ylabel("test images named right, %", color=FAINT, size=9)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    frame(axes, "left", "bottom")
    best = {
        row.epsilon: f"{statistics.mean(scores):.1f} % at ε = {row.epsilon:g} ({method})"
        for method, points in methods.items() for row, scores in points
        if statistics.mean(scores) == max(statistics.mean(s) for m in methods.values()
                                          for r, s in m if r.epsilon == row.epsilon)
    }  # fmt: skip
    save_picture(figure, path, f"{TITLE}. Best: {'; '.join(best[b] for b in budgets)}")
