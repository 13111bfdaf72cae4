#!/usr/bin/env python3
"""The picture of `flash.md`: what a private step does over time, and what memory it holds.

    python -m docs.draw_flash                          docs/flash_step.png
    python -m docs.draw_flash --output step.png

A schematic of six equal linear layers, nothing of it measured. A box of a product is as wide as its
operations; passes over memory, coefficients, and noise and step have a width that shows them.
"""

import argparse
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ddp_by_hand.measure import write_atomically

LAYERS = 6
TOGETHER = 2  # layers of a common launch
# Memory of a layer, relative to what its forward saves; G of four samples in 16 bit is twice the
# float32 sum.
GRADIENTS, SUM = 0.7, 0.35
PASS, COEFFICIENTS, STEP = 0.62, 0.8, 3.0  # widths that operations do not give

INK, FAINT = "#222222", "#6B6B6B"
COLOURS = {  # by Okabe and Ito; boxes are labelled, too
    "forward": ("#A9D5F0", INK),
    "backward": ("#0072B2", "white"),
    "norms": ("#E69F00", INK),
    "c": ("#CC79A7", INK),
    "sums": ("#009E73", "white"),
    "step": ("#8A8A8A", "white"),
}
MEANINGS = {
    "forward": "forward",
    "backward": "backward: input gradients",
    "norms": "per-sample gradients, squared and added up",
    "c": "coefficients",
    "sums": "(clipped) sum: the weight gradient",
    "step": "noise and optimizer step",
}
MEMORY = {  # from the bottom of the stack
    "sums": ("#9BD8C6", "weight gradients"),
    "kept": ("#F5D591", "per-sample gradients G"),
    "saved": ("#D6EAF7", "saved by forward"),
}


CAPTION = f"""\
Schematic of {LAYERS} equal linear layers, nothing measured. Numbers are layers, a box with several
is one launch; u: one product of a layer. Flat clipping needs the norms of all layers before c.
Dashed: the most that the ordinary step holds. Products are as wide as their operations; c, the
sums in (b) and (c), and the last box are not to scale."""


@dataclass(frozen=True)
class Box:
    """What the device does for a while.

    Attributes:
        phase: written above boxes that follow each other.
        changes: memory by the end of the box, more or less than at its start.
    """

    kind: str
    width: float
    text: str
    phase: str
    changes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    title: str
    cost: str
    boxes: list[Box]
    remark: str


def forward() -> list[Box]:
    return [Box("forward", 1, str(n), "forward", {"saved": 1}) for n in range(1, LAYERS + 1)]


def finish(text: str = "noise, step") -> Box:
    return Box("step", STEP, text, "")


def pairs() -> Iterator[list[int]]:
    """Layers of each common launch, in the order of backward."""
    for last in range(LAYERS, 0, -TOGETHER):
        yield list(range(last, last - TOGETHER, -1))


def backward(layers: list[int], phase: str) -> list[Box]:
    return [Box("backward", 1, str(n), phase) for n in layers]


def shared(kind: str, layers: list[int], width: float, phase: str, **changes: float) -> Box:
    """One box for several layers; `changes` are those of one of them."""
    total = {name: change * len(layers) for name, change in changes.items()}
    return Box(kind, width * len(layers), " ".join(map(str, layers)), phase, total)


def ordinary() -> list[Box]:
    boxes, phase = forward(), "backward"
    for layers in pairs():
        for n in layers:
            boxes += backward([n], phase)
            boxes.append(shared("sums", [n], 1, phase, saved=-1, sums=SUM))
    return [*boxes, finish("step")]


def two_passes() -> list[Box]:
    boxes, first, second = forward(), "first backward: norms only", "second backward: sums"
    for layers in pairs():
        boxes += [*backward(layers, first), shared("norms", layers, 1, first)]
    boxes.append(Box("c", COEFFICIENTS, "c", ""))
    for layers in pairs():
        boxes += backward(layers, second)
        boxes.append(shared("sums", layers, 1, second, saved=-1, sums=SUM))
    return [*boxes, finish()]


def bookkeeping() -> list[Box]:
    boxes, phase = forward(), "the only backward: norms, and G is kept"
    for layers in pairs():
        boxes += backward(layers, phase)
        boxes.append(shared("norms", layers, 1, phase, saved=-1, kept=GRADIENTS))
    boxes.append(Box("c", COEFFICIENTS, "c", ""))
    for layers in pairs():
        boxes.append(shared("sums", layers, PASS, "sums", kept=-GRADIENTS, sums=SUM))
    return [*boxes, finish()]


def per_layer() -> list[Box]:
    boxes = forward()
    for number, layers in enumerate(pairs(), start=1):
        phase = f"chunk {number}"
        boxes += backward(layers, phase)
        boxes.append(shared("norms", layers, 1, phase, saved=-1, kept=GRADIENTS))
        boxes.append(Box("c", COEFFICIENTS, "c", phase))
        boxes.append(shared("sums", layers, PASS, phase, kept=-GRADIENTS, sums=SUM))
    return [*boxes, finish()]


PANELS = [
    Panel(
        "Ordinary step, for comparison", "3u", ordinary(),
        "a weight gradient takes\nthe place of what\nforward saved",
    ),
    Panel(
        "(a) Two passes, flat clipping: keep nothing, go through backward again",
        "4u and the norms, here 5u", two_passes(),
        "nothing is freed before the second backward, which needs it again",
    ),
    Panel(
        "(b) Bookkeeping, flat clipping: keep per-sample gradients until c is known",
        "3u, and one pass over G", bookkeeping(),
        "G takes the place of\nwhat forward saved",
    ),
    Panel(
        "(c) Per-layer clipping in chunks: a layer's c needs no other layer's norm",
        "3u, and one pass over G", per_layer(),
        "G of one chunk\nat a time",
    ),
]  # fmt: skip


WIDTH, HEAD, FOOT = 9.0, 1.22, 0.7  # inches
TITLE, PHASES, STRIP, GAP, LEVELS, BELOW = 0.27, 0.2, 0.3, 0.06, 0.72, 0.3
LEFT, RIGHT = 0.115, 0.985  # of the width


def draw(path: Path) -> None:
    """Write the picture as a PNG, atomically."""
    from matplotlib.figure import Figure

    panel = TITLE + PHASES + STRIP + GAP + LEVELS + BELOW
    height = HEAD + len(PANELS) * panel + FOOT
    figure = Figure(figsize=(WIDTH, height), dpi=200, facecolor="white")
    longest = max(sum(box.width for box in panel.boxes) for panel in PANELS)
    most = max(sum(level.values()) for _, level in levels(ordinary()))
    for number, one in enumerate(PANELS):
        top = height - HEAD - number * panel - TITLE - PHASES
        strip = figure.add_axes(
            (LEFT, (top - STRIP) / height, RIGHT - LEFT, STRIP / height), xlim=(0, longest)
        )
        bottom = top - STRIP - GAP - LEVELS
        memory = figure.add_axes(
            (LEFT, bottom / height, RIGHT - LEFT, LEVELS / height), xlim=(0, longest)
        )
        figure.text(
            0.012, (top + PHASES + 0.1) / height, one.title, size=10.5, weight="bold", color=INK
        )
        figure.text(RIGHT, (top + PHASES + 0.1) / height, one.cost, size=9.5, color=INK, ha="right")
        for axes, name in ((strip, "time"), (memory, "memory held")):
            middle = (axes.get_position().y0 + axes.get_position().y1) / 2
            figure.text(0.012, middle, name, size=8.5, color=FAINT, va="center")
        draw_strip(strip, one)
        draw_memory(memory, one, most, longest)
    write_around(figure, height)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def draw_strip(axes, panel: Panel) -> None:
    axes.set_axis_off()
    axes.set_ylim(0, 1)
    start = 0.0
    for phase, own in groupby(panel.boxes, key=lambda box: box.phase):
        begin = start
        for box in own:
            fill, ink = COLOURS[box.kind]
            axes.add_patch(_rectangle((start, 0), box.width, fill))
            axes.text(
                start + box.width / 2, 0.47, box.text, size=7.5, color=ink, ha="center",
                va="center",
            )  # fmt: skip
            start += box.width
        if phase:
            axes.plot([begin + 0.08, start - 0.08], [1.14] * 2, color=FAINT, lw=0.8, clip_on=False)
            axes.text(
                (begin + start) / 2, 1.24, phase, size=8, color=FAINT, ha="center", va="bottom"
            )


def _rectangle(corner: tuple[float, float], width: float, fill: str):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, 1, facecolor=fill, edgecolor="white", lw=0.8)


def levels(boxes: list[Box]) -> list[tuple[float, dict[str, float]]]:
    """Memory by its kind at the start and after each box."""
    time, level = 0.0, dict.fromkeys(MEMORY, 0.0)
    found = [(time, dict(level))]
    for box in boxes:
        time += box.width
        for name, change in box.changes.items():
            level[name] += change
        found.append((time, dict(level)))
    return found


def draw_memory(axes, panel: Panel, most: float, longest: float) -> None:
    found = levels(panel.boxes)
    times = [time for time, _ in found]
    axes.stackplot(
        times,
        *([level[name] for _, level in found] for name in MEMORY),
        colors=[fill for fill, _ in MEMORY.values()],
    )
    axes.plot(times, [sum(level.values()) for _, level in found], color=INK, lw=0.9)
    axes.axhline(most, color=FAINT, lw=0.8, ls=(0, (4, 3)))
    has_room = times[-1] < 0.9 * longest
    place, side = (times[-1] + 0.4, "left") if has_room else (longest / 2, "center")
    axes.text(place, 0.45 * most, panel.remark, size=8, color=INK, va="center", ha=side)
    axes.set_ylim(0, 1.12 * most)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def write_around(figure, height: float) -> None:
    """Title, legends and caption."""
    from matplotlib.patches import Patch

    figure.text(
        0.012, 1 - 0.12 / height, "Three ways through a private step", size=13, weight="bold",
        color=INK, va="top",
    )  # fmt: skip
    boxes = [Patch(color=COLOURS[kind][0], label=text) for kind, text in MEANINGS.items()]
    areas = [Patch(color=fill, label=text) for fill, text in MEMORY.values()]
    for name, handles, top in (("time", boxes, 0.4), ("memory", areas, 0.82)):
        figure.text(0.012, 1 - (top + 0.07) / height, name, size=8.5, color=FAINT, va="top")
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(LEFT - 0.008, 1 - top / height),
            ncols=3, frameon=False, fontsize=8.5, handlelength=1.2, columnspacing=1.4,
            borderpad=0.2,
        )  # fmt: skip
    figure.text(
        0.012, (FOOT - 0.04) / height, CAPTION, size=8, color=FAINT, va="top",
        linespacing=1.4,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="docs.draw_flash", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("flash_step.png"), metavar="PNG",
        help="default: flash_step.png beside this file",
    )  # fmt: skip
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
