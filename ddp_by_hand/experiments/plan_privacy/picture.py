"""Draws a plan: predicted loss against batch and against compute, and a law against its runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_by_hand.experiments.plan_privacy.law import Observation
from ddp_by_hand.experiments.plan_privacy.plan import Candidate, Planner
from ddp_by_hand.measure.curves import COLOURS
from ddp_by_hand.measure.picture import FAINT, INK, frame, new_figure, save_picture

MOST = 5  # sizes that are drawn, and the chosen one
ROOM = 1.6  # losses up to so many times the chosen one are shown
CHOSEN = "#D55E00"


def draw_plan(
    path: Path,
    planner: Planner,
    chosen: Candidate,
    title: str,
    measured: float | None = None,
    seen: Sequence[Observation] = (),
) -> None:
    """Writes the picture; with `seen`, what the law was fitted to, a third panel compares it."""
    sentence = (
        f"Predicted best: {short(chosen.parameters)} parameters, {chosen.steps:,.0f} steps of "
        f"{chosen.batch:,.0f}, loss {chosen.loss:.3f}"
    )
    if measured is not None:
        sentence += f"; measured {measured:.3f} ({chosen.loss / measured - 1:+.1%})"
    law = f"Law: {planner.law.source}"
    panels = 3 if seen else 2
    figure = new_figure(4.9, sentence, [title, law], size=8.5, width=5.2 * panels)
    axes = figure.subplots(1, panels)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.76, bottom=0.13, wspace=0.24)
    _draw_batches(axes[0], planner, chosen, measured)
    _draw_compute(axes[1], planner, chosen, measured)
    if seen:
        _draw_fit(axes[2], planner, seen, chosen, measured)
    save_picture(figure, path, f"{sentence}. {title}. {law}")


def short(count: float) -> str:
    """Returns a number of parameters in words: 66.5 M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


def _draw_batches(axes: Any, planner: Planner, chosen: Candidate, measured: float | None) -> None:
    every = -(-len(planner.sizes) // MOST)
    sizes = sorted({*sorted(planner.sizes)[::every], chosen.parameters})
    for place, size in enumerate(sizes):
        own = planner.along(size)
        axes.plot([one.batch for one in own], [one.loss for one in own], lw=1.6,
                  color=COLOURS[place % len(COLOURS)], label=short(size))  # fmt: skip
    _mark(axes, chosen.batch, chosen, measured)
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, ROOM * chosen.loss))
    axes.legend(title="parameters", frameon=False, fontsize=8, title_fontsize=8, loc="best")
    title = f"Loss, {planner.law.unit}, against batch"
    _finish(axes, title, "batch, examples, at this compute", is_log=True)


def _draw_compute(axes: Any, planner: Planner, chosen: Candidate, measured: float | None) -> None:
    curve = planner.curve()
    axes.plot([each for each, _ in curve], [one.loss for _, one in curve], color=INK, lw=1.8)
    _mark(axes, chosen.flops(planner.law.tokens), chosen, measured)
    _finish(axes, "Loss of the best training against compute", "FLOPs, at most", is_log=True)


def _draw_fit(
    axes: Any,
    planner: Planner,
    seen: Sequence[Observation],
    chosen: Candidate,
    measured: float | None,
) -> None:
    predicted = [float(planner.law.loss(*one[:3])) for one in seen]
    observed = [one.loss for one in seen]
    ends = [min(observed + predicted), max(observed + predicted)]
    axes.plot(ends, ends, color=FAINT, lw=0.9, ls=":")
    axes.plot(
        observed, predicted, ".", ms=6, color=COLOURS[4], mew=0, label="runs it was fitted to"
    )
    if measured is not None:
        axes.plot([measured], [chosen.loss], "*", ms=13, color=CHOSEN, label="the run it predicted")
    axes.legend(frameon=False, fontsize=8)
    _finish(axes, "Predicted against measured loss", "measured", is_log=False)


def _mark(axes: Any, x: float, chosen: Candidate, measured: float | None) -> None:
    axes.plot([x], [chosen.loss], "*", ms=13, color=CHOSEN, zorder=5, label="predicted")
    if measured is not None:
        axes.plot([x], [measured], "x", ms=8, mew=2, color=INK, zorder=6, label="measured")


def _finish(axes: Any, title: str, label: str, *, is_log: bool) -> None:
    if is_log:
        axes.set_xscale("log")
        _label_decades(axes)
    axes.set_title(title, loc="left", size=10, color=INK)
    axes.set_xlabel(label, size=9, color=FAINT)
    frame(axes, "bottom", "left")
    axes.grid(axis="y", color="#E4E4E4", lw=0.6)


def _label_decades(axes: Any) -> None:
    """Labels 1, 2 and 5 of each decade if there are few, otherwise the decades alone."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim()
    if high < 30 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
