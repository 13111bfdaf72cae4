"""Measures which norm algorithm is fastest at which length, beside the prediction; draws both.

A square layer, B·T fixed: the ordinary weight gradient does not depend on T, so that times relative
to it can be compared over all lengths. `width` grows with T, `gradient` falls, because its
traffic does with the number of samples, and `input_length` stays.
"""

from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import median

import torch

from ddp_by_hand.experiments.kernels.one_layer import (
    GRAM_LAYERS,
    OneLayer,
    Shape,
    judge_plan,
    medians,
    predicted_ms,
)
from ddp_by_hand.measure import Column, format_table
from ddp_by_hand.measure.picture import FAINT, INK, frame, new_figure, save_picture, write_key
from dp_clipping.planning.cost_model import (
    ACCUMULATE,
    ALGORITHMS,
    GRAM,
    INSTANTIATE,
    LONGEST_GRAM,
    Rates,
)

FEATURES = (2048, 4096)
TOKENS = 8192  # in all, B·T
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)

TITLE = "Norm and clipped sum of one linear layer: which algorithm pays"
STYLES = {  # told apart also by line and marker
    INSTANTIATE: {"color": "#D55E00", "linestyle": "-", "marker": "o"},
    GRAM: {"color": "#0072B2", "linestyle": (0, (5, 2)), "marker": "s"},
    ACCUMULATE: {"color": "#222222", "linestyle": (0, (1, 1.5)), "marker": "^"},
}
MEANINGS = {
    INSTANTIATE: "gradient: G kept, then summed",
    GRAM: "width: Gram matrices, then a product",
    ACCUMULATE: "input_length: G accumulated, then a product",
}


def shapes() -> list[Shape]:
    return [Shape(TOKENS // t, t, n, n) for n in FEATURES for t in LENGTHS]


def measure(shape: Shape, device: torch.device, rounds: int, rates: Rates) -> dict:
    """Measures one cell of the results."""
    layer = OneLayer(shape, device)
    samples = layer.time_algorithms(rounds)
    return {
        "shape": list(shape),
        "samples_ms": samples,
        "predicted_ms": predicted_ms(shape, rates),
        "plan": judge_plan(shape, rates, medians(samples)),
    }


def panels(results: dict) -> dict[int, list[dict]]:
    """Groups cells by features, then length, and adds ratios to the panel's ordinary gradient."""
    by_features: dict[int, list[dict]] = {}
    for cell in results["cells"]:
        by_features.setdefault(cell["shape"][2], []).append(cell)
    for cells in by_features.values():
        cells.sort(key=lambda cell: cell["shape"][1])
        ordinary = median(x for cell in cells for x in cell["samples_ms"]["ordinary"])
        for cell in cells:
            ms = medians(cell["samples_ms"])
            cell["ordinary_ms"] = ordinary
            cell["measured"] = {name: ms[name] / ordinary for name in ALGORITHMS}
            cell["predicted"] = {name: cell["predicted_ms"][name] / ordinary for name in ALGORITHMS}
    return by_features


def crossing(cells: list[dict], key: str, one: str, other: str) -> tuple[float, float] | None:
    """Returns (length, ratio) at which two curves cross on logarithmic axes, or None."""
    for before, after in pairwise(cells):
        gaps = [log(cell[key][one] / cell[key][other]) for cell in (before, after)]
        if gaps[0] != gaps[1] and gaps[0] * gaps[1] <= 0:
            share = gaps[0] / (gaps[0] - gaps[1])
            between = [
                (1 - share) * log(left) + share * log(right)
                for left, right in (
                    (before["shape"][1], after["shape"][1]),
                    (before[key][one], after[key][one]),
                )
            ]
            return exp(between[0]), exp(between[1])
    return None


def pairs() -> list[tuple[str, str]]:
    return [(GRAM, INSTANTIATE), (GRAM, ACCUMULATE), (INSTANTIATE, ACCUMULATE)]


def report(results: dict) -> str:
    """Formats ratios to the ordinary weight gradient, one line per shape, and the crossings."""
    columns = ["shape", Column("ordinary ms", format=".3f")]
    columns += [Column(name, format=".2f") for name in ALGORITHMS]
    columns += [Column(f"{name} predicted", format=".2f") for name in ALGORITHMS]
    columns += ["plan", "best", Column("% over best", format=".1f")]
    rows, lines = [], []
    for features, cells in panels(results).items():
        for cell in cells:
            rows.append({
                "shape": str(Shape(*cell["shape"])), "ordinary ms": cell["ordinary_ms"],
                **cell["measured"],
                **{f"{name} predicted": value for name, value in cell["predicted"].items()},
                "plan": cell["plan"]["chosen"], "best": cell["plan"]["best"],
                "% over best": 100 * cell["plan"]["excess"],
            })  # fmt: skip
        for one, other in pairs():
            found = [crossing(cells, key, one, other) for key in ("measured", "predicted")]
            lengths = ["none" if point is None else f"T = {point[0]:.0f}" for point in found]
            line = f"d = p = {features}: {one} meets {other} at {lengths[0]}"
            lines.append(f"{line} (predicted {lengths[1]})")
    return "\n".join([format_table(columns, rows), "", *lines])


def draw(results: dict, path: str | Path) -> None:
    """Writes the picture as a PNG, atomically."""
    by_features = panels(results)
    figure = new_figure(5.0, TITLE, [], width=4.6 * len(by_features))
    left, width = 0.075, 0.92 / len(by_features)
    limits = _limits(by_features)
    for number, (features, cells) in enumerate(by_features.items()):
        axes = figure.add_axes((left + number * width, 0.235, width - 0.035, 0.545))
        _draw_panel(axes, features, cells, limits, first=number == 0)
    _write_around(figure, results)
    save_picture(figure, path, f"{TITLE}: the lowest curve at a length is the fastest there.")


def _limits(by_features: dict[int, list[dict]]) -> tuple[float, float]:
    ratios = [
        ratio
        for cells in by_features.values()
        for cell in cells
        for key in ("measured", "predicted")
        for ratio in cell[key].values()
    ]
    return 0.8 * min(ratios), 1.8 * max(ratios)  # above: what the rings mean


def _draw_panel(axes, features: int, cells: list[dict], limits, first: bool) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    lengths = [cell["shape"][1] for cell in cells]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    axes.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    axes.axhline(1, color=FAINT, lw=0.8, zorder=0)
    axes.axvline(LONGEST_GRAM, color=FAINT, lw=0.8, ls=(0, (2, 3)), zorder=0)
    for name, style in STYLES.items():
        line = {key: style[key] for key in ("color", "linestyle")}
        axes.plot(lengths, [cell["predicted"][name] for cell in cells], lw=1.5, **line)
        axes.plot(
            lengths, [cell["measured"][name] for cell in cells], linestyle="none",
            marker=style["marker"], ms=6, mfc="none", mec=style["color"], mew=1.4,
        )  # fmt: skip
    _mark_crossings(axes, cells, limits)
    axes.set_xticks(lengths, [f"{t}\n{cell['shape'][0]}" for t, cell in zip(lengths, cells)])  # noqa: B905
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if limits[0] <= t <= limits[1]]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels([f"{tick:g}×" for tick in ticks] if first else [])
    frame(axes, "bottom", "left")
    axes.set_xlabel("tokens of a sample T, and samples B below", size=8.5, color=FAINT)
    title = f"d = p = {features}, ordinary {cells[0]['ordinary_ms']:.3f} ms"
    axes.set_title(title, size=10, loc="left", color=INK)
    if first:
        axes.set_ylabel("norm and clipped sum / ordinary gradient", size=8.5, color=FAINT)


def _mark_crossings(axes, cells: list[dict], limits: tuple[float, float]) -> None:
    """Marks crossings of measured curves with a ring and a number, explained in the corner."""
    lines = []
    for number, (one, other) in enumerate(pairs(), start=1):
        point = crossing(cells, "measured", one, other)
        if point is None:
            continue
        axes.plot(*point, marker="o", ms=12, mfc="none", mec=INK, mew=1.0)
        axes.annotate(
            str(number), point, xytext=(0, 10), textcoords="offset points", size=8.5,
            weight="bold", ha="center", color=INK,
        )  # fmt: skip
        predicted = crossing(cells, "predicted", one, other)
        expected = "none" if predicted is None else f"{predicted[0]:.0f}"
        lines.append(f"{number}: {one} = {other} at T = {point[0]:.0f} (predicted {expected})")
    axes.text(
        0.02, 0.985, "\n".join(lines), transform=axes.transAxes, size=8, va="top", color=INK,
        linespacing=1.35,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _write_around(figure, results: dict) -> None:
    """Writes legend and caption."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], lw=1.5, ms=6, mfc="white", mew=1.4, label=MEANINGS[name], **style)
        for name, style in STYLES.items()
    ]
    write_key(figure, handles, 0.4, columns=3, handlelength=3.2)
    figure.text(0.012, 0.105, caption(results), size=8, color=FAINT, va="top", linespacing=1.4)


def caption(results: dict) -> str:
    where = results["environment"]
    gpus = where.get("gpus") or [{"name": "no GPU"}]
    return (
        f"y [B, T, d], a [B, T, p] in bfloat16, B·T = {TOKENS}. Markers: measured, medians of "
        f"{results['rounds']} interleaved samples; lines: predicted by the plan; rings: measured "
        f"curves meet.\n"
        f"1×: the ordinary weight gradient by the library. Gram norms of {GRAM_LAYERS} layers are "
        f"one launch. Up to the dotted line at T = {LONGEST_GRAM} the plan may take width.\n"
        f"{gpus[0]['name']}, torch {where.get('torch')}, triton {where.get('triton')}, "
        f"{str(where.get('date'))[:10]}"
    )
