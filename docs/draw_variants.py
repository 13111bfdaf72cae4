#!/usr/bin/env python3
"""The pictures of `variants.md`: what one rank does over time in a step of each variant.

    python -m docs.draw_variants                       docs/variant_*.png
    python -m docs.draw_variants --folder pictures

A schematic of four equal layers on two ranks, nothing of it measured. A message takes time for the
call and for its bytes, and computation is slower beside a collective that occupies multiprocessors.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp.buckets import Gradient, plan_buckets
from ddp_by_hand.measure.picture import save_picture

LAYERS, EACH = 4, 3  # gradients of a layer
GRADIENTS = LAYERS * EACH
FORWARD, BACKWARD, STEP = 1.0, 2.1, 1.6  # time of a layer, of a layer, of all
COPY = 0.05  # of a gradient into its bucket
CALL, BYTES = 0.34, 0.25  # an all-reduce: for the call, for the bytes of one gradient
SLOWER, SLOWED = 1.22, ("forward", "backward")  # beside a collective
BUCKET = 5  # gradients

Message = tuple[str, float]  # text, duration
Plan = Mapping[int, Message]  # what is sent after which gradient, counted from 1


@dataclass(frozen=True)
class Work:
    """Something that a rank computes.

    Attributes:
        needs: how many messages must have arrived before.
        sends: messages that can go once it is done.
    """

    kind: str
    text: str
    width: float
    needs: int = 0
    sends: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A step of a variant.

    Attributes:
        title: the sentence to read off the picture.
        holds: the part of parameters, gradients and optimizer state that a rank holds.
        contends: whether its messages slow down what is computed beside them.
    """

    title: str
    works: list[Work]
    holds: tuple[float, float, float] = (1, 1, 1)
    contends: bool = True


def forward() -> list[Work]:
    return [Work("forward", str(n), FORWARD) for n in range(1, LAYERS + 1)]


def backward(plan: Plan, copies: bool = False) -> list[Work]:
    found = []
    for number in range(1, GRADIENTS + 1):
        text = str(LAYERS - (number - 1) // EACH) if number % EACH == 2 else ""
        sends = (plan[number],) if number in plan else ()
        if copies:
            found += [Work("backward", text, BACKWARD / EACH), Work("copy", "", COPY, 0, sends)]
        else:
            found.append(Work("backward", text, BACKWARD / EACH, 0, sends))
    return found


def lasts(gradients: int, part: float = 1.0) -> float:
    """An all-reduce of so many gradients; `part` 0.5: a reduce-scatter or an all-gather."""
    return part * (CALL + BYTES * gradients)


def buckets(part: float = 1.0) -> Plan:
    """Buckets as the course plans them."""
    planned = plan_buckets([Gradient(1, "", 4)] * GRADIENTS, range(GRADIENTS), 4 * BUCKET)
    return {b.members[-1] + 1: (str(len(b.members)), lasts(len(b.members), part)) for b in planned}


def replicated(plan: Plan, copies: bool = False) -> list[Work]:
    return [*forward(), *backward(plan, copies), Work("step", "step", STEP, len(plan))]


def sharded() -> list[Work]:
    """A reduce-scatter of each bucket in backward; then its slice is stepped and gathered."""
    plan = buckets(part=0.5)
    reduced = {after: (f"r{size}", time) for after, (size, time) in plan.items()}
    works = [*forward(), *backward(reduced, copies=True)]
    for number, (size, time) in enumerate(plan.values(), start=1):
        width = STEP / 2 * int(size) / GRADIENTS
        works.append(Work("step", "", width, number, ((f"g{size}", time),)))
    return [*works, Work("end", "", 0.0, 2 * len(plan))]


def gathered() -> list[Work]:
    """Each layer is gathered while the one before it computes, in forward and in backward."""
    time = lasts(EACH, part=0.5)
    order = [*range(1, LAYERS + 1), *range(LAYERS, 0, -1)]
    works = [Work("end", "", 0.0, 0, (("g1", time), ("g2", time)))]
    arrives, sent = {0: 1, 1: 2}, 2
    for place, n in enumerate(order):
        names = [f"r{n}"] if place >= LAYERS else []
        if place + 2 < len(order) and place + 2 != LAYERS:  # the last layer is still there
            names.append(f"g{order[place + 2]}")
            arrives[place + 2] = sent + len(names)
        kind, width = ("forward", FORWARD) if place < LAYERS else ("backward", BACKWARD)
        sends = tuple((name, time) for name in names)
        works.append(Work(kind, str(n), width, arrives.get(place, 0), sends))
        sent += len(names)
    return [*works, Work("step", "step", STEP / 2, sent)]


def apart() -> list[Work]:
    """The last step of a round: buckets of what the round has moved, then the outer step."""
    sends = tuple(buckets().values())
    works = [*forward(), *backward({}), Work("step", "step", STEP, 0, sends)]
    return [*works, Work("step", "outer", 0.7 * STEP, len(sends))]


SINGLE: Plan = {n: ("1", lasts(1)) for n in range(1, GRADIENTS + 1)}
AFTERWARDS = [
    *forward(),
    *backward({GRADIENTS: ("", 0.0)})[:-1],
    Work("backward", "", BACKWARD / EACH, 0, tuple(SINGLE.values())),
    Work("step", "step", STEP, GRADIENTS),
]
VARIANTS = {
    "none": Variant("Nothing is sent: the floor", replicated({})),
    "ddp": Variant(f"{GRADIENTS} messages after backward: all of them exposed", AFTERWARDS),
    "ddp_individual": Variant(
        f"The same {GRADIENTS} messages, each as soon as its gradient is final", replicated(SINGLE)
    ),
    "ddp_individual_v2": Variant(
        f"The same bytes in {len(buckets())} messages, the last one small", replicated(buckets())
    ),
    "ddp_bucketed": Variant(
        f"{len(buckets())} flat buckets: gradients are copied into them",
        replicated(buckets(), True),
    ),
    "ddp_copy_engine": Variant(
        "Copy engines send: what is computed beside them keeps its speed",
        replicated(buckets(), True),
        contends=False,
    ),
    "zero1": Variant(
        "Half an all-reduce in backward, the other half after each slice's step",
        sharded(),
        (1, 1, 0.5),
    ),
    "zero2": Variant(
        "The same messages; what was reduced for the other rank is freed", sharded(), (1, 0.5, 0.5)
    ),
    "fsdp": Variant(
        "Layers are gathered (g) before they compute, gradients reduced (r) as they come",
        gathered(),
        (0.5, 0.5, 0.5),
    ),
    "diloco": Variant("The last step of a round; all others of it send nothing, as none", apart()),
}


@dataclass(frozen=True)
class Box:
    kind: str
    text: str
    start: float
    end: float


def run(variant: Variant) -> tuple[list[Box], list[Box]]:
    """Returns what is computed and what is sent: one thing at a time each, in order."""
    works, queue = list(variant.works), []
    computed, sent = [], []
    now, began, left = 0.0, None, works[0].width  # of the first of `works`
    going, message_left = 0.0, 0.0  # of the first of `queue`
    while works or queue:
        work = works[0] if works and works[0].needs <= len(sent) else None
        if work and began is None:
            began = now
        is_slow = work and queue and variant.contends and work.kind in SLOWED
        rate = 1 / SLOWER if is_slow else 1.0
        passed = min(([left / rate] if work else []) + ([message_left] if queue else []))
        now, message_left = now + passed, message_left - passed
        left -= passed * rate if work else 0.0
        if queue and message_left < 1e-9:
            sent.append(Box("message", queue.pop(0)[0], going, now))
            going, message_left = now, queue[0][1] if queue else 0.0
        if work and left < 1e-9:
            computed.append(Box(work.kind, work.text, began, now))
            if work.sends and not queue:
                going, message_left = now, work.sends[0][1]
            queue += work.sends
            works.pop(0)
            began, left = None, works[0].width if works else 0.0
    return computed, sent


INK, FAINT, ORANGE, PALE = "#222222", "#6B6B6B", "#D55E00", "#F5C9A6"
FILLS = {
    "forward": ("#A9D5F0", INK),
    "backward": ("#0072B2", "white"),
    "copy": ("#CC79A7", INK),
    "step": ("#8A8A8A", "white"),
}
MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "copy": "copy into a bucket",
    "step": "optimizer",
}
HELD = ("parameters", "gradients", "optimizer state")
WIDTH, HEIGHT, LEFT, RIGHT = 9.0, 1.75, 0.085, 0.985


def draw(name: str, path: Path, longest: float, floor: float) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    variant = VARIANTS[name]
    computed, sent = run(variant)
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=160, facecolor="white")
    label = figure.text(0.012, 0.96, name, size=11, weight="bold", color=INK, va="top")
    axes = figure.add_axes((LEFT, 0.2, RIGHT - LEFT, 0.6), xlim=(0, longest), ylim=(-0.1, 2.1))
    axes.set_axis_off()
    for y, text in ((1.5, "computes"), (0.5, "messages")):
        axes.text(-0.15, y, text, size=8.5, color=FAINT, ha="right", va="center")
    for box in computed:
        if box.kind != "end":
            fill, ink = FILLS[box.kind]
            _box(axes, box, 1.05, fill, ink)
    for box in sent:
        _box(axes, box, 0.05, PALE, INK)
        for start, end in _exposed(box, computed):
            hatched = Rectangle((start, 0.05), end - start, 0.9, hatch="////", fill=False)
            hatched.set(edgecolor=ORANGE, lw=0)
            axes.add_patch(hatched)
    slowed = list(_slowed(variant, computed, sent))
    for start, end in slowed:
        axes.add_patch(Rectangle((start, 1.05), end - start, 0.16, facecolor=ORANGE))
    last = max(b.end for b in computed if b.kind in ("backward", "copy"))
    axes.plot([last, last], [0, 2.1], color=INK, lw=1.6)
    axes.plot([floor, floor], [0, 2.1], color=FAINT, lw=0.9, ls=(0, (3, 2)))
    if name != "none":
        axes.text(floor + 0.1, 2.12, "end of none", size=7.5, color=FAINT, va="center")
    axes.annotate(
        variant.title, (1, 1), (9, -0.7), label, textcoords="offset points", size=10, va="top"
    )
    if variant.holds != (1, 1, 1):
        _draw_memory(figure.add_axes((0.875, 0.2, 0.11, 0.6)), variant.holds)
    handles = [
        Patch(color=FILLS[kind][0], label=text)
        for kind, text in MEANINGS.items()
        if any(b.kind == kind for b in computed)
    ]
    if sent:
        handles += [
            Patch(color=PALE, label="message"),
            Patch(fc=PALE, ec=ORANGE, hatch="////", lw=0, label="exposed: nothing computes"),
        ]
    if slowed:
        handles.append(Patch(color=ORANGE, label="slowed beside it"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(LEFT - 0.012, -0.03),
        ncols=len(handles), frameon=False, fontsize=7.8, handlelength=1.1, columnspacing=1.0,
    )  # fmt: skip
    save_picture(figure, path, f"{name}: {variant.title}")


def _draw_memory(axes, holds: tuple[float, float, float]) -> None:
    """Draws the part of each kind of memory that a rank holds: filled, of the whole."""
    from matplotlib.patches import Rectangle

    axes.set(xlim=(0, 1), ylim=(0, 3.1))
    axes.set_axis_off()
    axes.text(0, 3.2, "this rank holds", size=7.5, color=FAINT)
    for place, (part, what) in enumerate(zip(holds, HELD, strict=True)):
        bottom = 2.55 - place
        axes.add_patch(Rectangle((0, bottom), part, 0.4, facecolor="#009E73"))
        axes.add_patch(Rectangle((0, bottom), 1, 0.4, facecolor="none", edgecolor=FAINT, lw=0.8))
        axes.text(0, bottom - 0.07, what, size=7.5, color=INK, va="top")


def _exposed(box: Box, computed: list[Box]) -> list[tuple[float, float]]:
    """The parts of a message beside which nothing is computed."""
    found, start = [], box.start
    for work in computed:
        if work.end > start and work.start < box.end:
            if work.start > start:
                found.append((start, work.start))
            start = max(start, work.end)
    found.append((start, box.end))
    return [(start, end) for start, end in found if end - start > 0.05]


def _slowed(
    variant: Variant, computed: list[Box], sent: list[Box]
) -> Iterator[tuple[float, float]]:
    """The time in which a message slows down what is computed."""
    if variant.contends:
        for box in sent:
            for work in computed:
                start, end = max(box.start, work.start), min(box.end, work.end)
                if work.kind in SLOWED and end - start > 0.01:
                    yield start, end


def _box(axes, box: Box, bottom: float, fill: str, ink: str) -> None:
    from matplotlib.patches import Rectangle

    width, middle = box.end - box.start, (box.start + box.end) / 2
    axes.add_patch(
        Rectangle((box.start, bottom), width, 0.9, facecolor=fill, edgecolor="white", lw=0.5)
    )
    if width > 0.13 * len(box.text):
        axes.text(middle, bottom + 0.46, box.text, size=8, color=ink, ha="center", va="center")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="docs.draw_variants", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, metavar="FOLDER",
        help="default: that of this file",
    )  # fmt: skip
    folder = parser.parse_args().folder
    ends = {name: run(variant)[0][-1].end for name, variant in VARIANTS.items()}
    for name in VARIANTS:
        draw(name, folder / f"variant_{name}.png", 1.02 * max(ends.values()), ends["none"])


if __name__ == "__main__":
    main()
