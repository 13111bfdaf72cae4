"""Draws the efficiency of each variant from 1 to 1,024 GPUs, and where each stops paying."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from ddp_by_hand.measure.picture import (
    FAINT,
    INK,
    Label,
    frame,
    new_figure,
    save_picture,
    write_labels,
)

# dashes tell apart what lies together
COLOURS = ("#999999", "#D55E00", "#E69F00", "#CC79A7", "#0072B2", "#009E73", "#56B4E9", "#444444",
           "#B0A000", "#7A5195", "#8B4513")  # fmt: skip
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
COUNTS = tuple(2**i for i in range(11))  # GPUs
PAYS = 0.8  # the least efficiency that does
ROOM = 0.04  # of the axis, above 100 % or the highest curve


def last_that_pays(curve: Sequence[float]) -> str:
    """Returns the number of GPUs before the first one whose efficiency is too low."""
    paying = len(list(takewhile(lambda value: value >= PAYS, curve)))
    if paying == len(COUNTS):
        return "pays throughout"
    return f"up to {COUNTS[paying - 1] if paying else 0:,}"


def draw_efficiency(
    step_of: Callable[[str, int], float],
    variants: Sequence[str],
    subtitle: str,
    hosts_from: int,
    path: Path,
) -> None:
    """Writes the picture.

    Args:
        step_of: (variant, number of GPUs) -> seconds.
        variants: the first is the one without communication.
    """
    floor, *others = variants
    alone = step_of(floor, 1)
    curves = {name: [alone / step_of(name, n) for n in COUNTS] for name in others}
    counts, limit = COUNTS, PAYS
    title = "Efficiency of each variant, and the last number of GPUs at which it pays"
    figure = new_figure(5.8, title, [subtitle], width=10)
    axes = figure.add_axes((0.085, 0.115, 0.56, 0.735))
    low = min(limit, *(min(curve) for curve in curves.values()))
    bottom, top = max(0.0, low - 0.06), max(1.0, *(max(c) for c in curves.values())) + ROOM
    axes.set_xscale("log", base=2)
    axes.set(xlim=(counts[0], counts[-1]), ylim=(bottom, top), xticks=counts)
    axes.set_xticklabels([f"{n:,}" for n in counts], fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="y", color="#E6E6E6", lw=0.8)
    frame(axes, "bottom", "left")
    axes.set_xlabel("GPUs (the batch per GPU stays the same)")
    axes.set_ylabel(f"a step of {floor} on one GPU / a step")
    axes.axhline(limit, color=INK, lw=0.9, ls=":")
    note = {"fontsize": 8.5, "color": FAINT}
    axes.text(counts[0], limit - 0.008, f"  below {limit:.0%} it no longer pays", va="top", **note)
    if counts[0] < hosts_from < counts[-1]:
        axes.axvspan(hosts_from, counts[-1], color="#F4F6FA", zorder=0)
        axes.text(hosts_from * 1.06, bottom + 0.01, "more than one host →", **note)
    first: dict[tuple, str] = {}  # of variants with one curve; the others have its colour
    look = {
        name: first.setdefault(tuple(round(value, 3) for value in curve), name)
        for name, curve in curves.items()
    }
    labels = []
    for name in sorted(curves, key=lambda name: curves[look[name]][-1]):
        place = list(curves).index(look[name])
        colour, dashes = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        axes.plot(counts, curves[name], lw=2, marker="o", ms=3, color=colour, ls=dashes)
        end = curves[name][-1]
        label = f"{end:.0%} {name}: {last_that_pays(curves[name])}"
        labels.append(Label(counts[-1], end, label, colour))
    write_labels(axes, labels)
    save_picture(figure, path, f"{title}. {subtitle}")
