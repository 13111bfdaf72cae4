"""Draws what a private step costs on every network, from runs of `experiments.networks`.

    python -m ddp_by_hand.experiments.networks.picture                       those of docs/cost.md
    python -m ddp_by_hand.experiments.networks.picture --eager eager.json --graphs graphs.json

Files are what `--output` of `experiments.networks` wrote: without and with --cuda-graph, of the
same networks on the same machine. The same is printed as a table for a document. Needs no GPU.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_by_hand.experiments.networks.rows import ROWS
from ddp_by_hand.experiments.rounds import BASELINE
from ddp_by_hand.experiments.training import OPACUS_VARIANTS, OURS
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import is_writable, option, program
from ddp_by_hand.measure.picture import FAINT, INK, frame, new_figure, save_picture
from ddp_by_hand.measure.runs import STEP, Cell, Round, read_cells
from ddp_by_hand.measure.table import format_table

TITLE = "How much longer a private step takes than an ordinary one"
GREEN, ORANGE, RED = "#2A7F4F", "#E08A1E", "#B5382A"
MARKS = {
    "opacus_hooks": ("s", ORANGE, "Opacus, hooks"),
    "opacus_ghost": ("D", RED, "Opacus, ghost"),
}

RESULTS = Path("results/networks-1xh200")
Cells = dict[tuple[str, str], Cell]  # of a network and a variant


# fmt: off
@dataclass(frozen=True)
class Options:
    eager: Path = option(RESULTS / "eager.json", "results of eager steps", metavar="JSON")
    graphs: Path = option(RESULTS / "graphs.json", "results with --cuda-graph", metavar="JSON")
    picture: Path = option(Path("networks.png"), "is written", metavar="FILE",
        check=is_writable)
# fmt: on


def cells_in(path: Path) -> Cells:
    """Returns the cells of a run. Raises ValueError if it is none."""
    try:
        return {(c.names["row"], c.names["variant"]): c for c in read_cells(path)}
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: no results of experiments.networks: {error!r}") from None


def step_of(one: Round) -> float:
    return statistics.median(one.times[STEP])


def ratios(
    cells: Cells, row: str, variant: str, of: Callable[[Round], float] = step_of
) -> list[float]:
    """Returns how a variant compares with the ordinary step, in each round: medians of steps."""
    ours, ordinary = cells.get((row, variant)), cells.get((row, BASELINE))
    if ours is None or ordinary is None:
        return []
    others = {one.number: of(one) for one in ordinary.good_rounds}
    return [of(one) / others[one.number] for one in ours.good_rounds if one.number in others]


def ratio(*arguments: Any) -> float | None:
    """Returns the median of `ratios`; None if no round has both."""
    found = ratios(*arguments)
    return statistics.median(found) if found else None


def ratio_of_kernels(cells: Cells, row: str) -> float | None:
    """Returns the ratio of the times of all kernels, which are of one round."""
    both = [cells.get((row, variant)) for variant in (OURS, BASELINE)]
    ours, ordinary = (cell and cell.facts.get("kernel_ms") for cell in both)
    return ours / ordinary if ours and ordinary else None


def draw(path: Path, eager: Cells, graphs: Cells) -> None:
    """Writes the picture: a bar a network as CUDA graphs, and marks of eager steps."""
    best = {row: ratio(graphs, row, OURS) or ratio(eager, row, OURS) for row in ROWS}
    rows = sorted((row for row in ROWS if best[row]), key=lambda row: -best[row])
    lines = ["× an ordinary step of the same network and batch; 1: privacy costs no time"]
    figure = new_figure(0.27 * len(rows) + 1.4, TITLE, lines)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.2, right=0.97, top=1 - 0.75 / figure.get_figheight(), bottom=0.16)
    axes.axvline(1, color=INK, lw=1, zorder=3)
    axes.barh(
        range(len(rows)), [ratio(graphs, row, OURS) or 0 for row in rows], 0.62, color=GREEN,
        label="here, as a CUDA graph",
    )  # fmt: skip
    here = [ratio(eager, row, OURS) for row in rows]
    for place, row in enumerate(rows):
        if found := ratios(eager, row, OURS):
            axes.plot([min(found), max(found)], [place, place], color=GREEN, lw=1.2, zorder=1)
    axes.plot(here, range(len(rows)), "o", mfc="white", mec=GREEN, mew=1.6, ms=6, ls="none",
              label="here, eager (Python's time included; line: rounds)")  # fmt: skip
    for variant, (mark, colour, label) in MARKS.items():
        found = [ratio(eager, row, variant) for row in rows]
        axes.plot(found, range(len(rows)), mark, color=colour, ms=5, ls="none", label=label)
    for place, row in enumerate(rows):
        if not any(ratio(eager, row, variant) for variant in OPACUS_VARIANTS):
            axes.text(1, place, "Opacus cannot", ha="right", va="center", size=8, color=FAINT,
                      transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlim(left=0)
    frame(axes, "bottom")
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=8.5, ncols=4, loc="upper center", handletextpad=0.3,
                bbox_to_anchor=(0.4, -0.07), columnspacing=1.2)  # fmt: skip
    below = sum((ratio(graphs, row, OURS) or 9) <= 1.1 for row in rows)
    save_picture(figure, path, f"{TITLE}: at most 1.1 on {below} of {len(rows)} networks as graphs")


def document(eager: Cells, graphs: Cells) -> str:
    """Returns the table as Markdown: milliseconds ordinary / private, and their ratio.

    With several rounds these are medians of them, and the least and the largest ratio follow.
    """

    def pair(cells: Cells, row: str) -> str:
        found = ratios(cells, row, OURS)
        if not found:
            return "–"
        both = (map(step_of, cells[row, variant].good_rounds) for variant in (BASELINE, OURS))
        text = " / ".join(f"{statistics.median(ms):.1f}" for ms in both)
        text += f", {statistics.median(found):.2f}"
        return text + (f" [{min(found):.2f}, {max(found):.2f}]" if len(found) > 1 else "")

    def shown(found: float | None) -> str:
        return "–" if found is None else f"{found:.2f}"

    def memory(row: str, variant: str) -> str:
        return shown(ratio(eager, row, variant, lambda one: one.peak_memory_mb))

    table = [
        {
            "network, batch": f"`{row}`, " + cell.settings["batch"].replace(" x ", " × "),
            "graph": pair(graphs, row),
            "eager": pair(eager, row),
            "kernels": shown(ratio_of_kernels(eager, row)),
            "Opacus `hooks`": shown(ratio(eager, row, OPACUS_VARIANTS[0])),
            "`ghost`": shown(ratio(eager, row, OPACUS_VARIANTS[1])),
            "peak memory": " / ".join(memory(row, variant) for variant in (OURS, *OPACUS_VARIANTS)),
        }
        for row in ROWS
        if (cell := eager.get((row, BASELINE)))
    ]
    return format_table(list(table[0]), table, markdown=True)


@program("ddp_by_hand.experiments.networks.picture", Options)
def main(options: Options) -> int:
    """Prints the table and writes the picture."""
    with bad_input():
        eager, graphs = cells_in(options.eager), cells_in(options.graphs)
        if not any((row, BASELINE) in eager for row in ROWS):
            raise ValueError(f"{options.eager}: no steps of these networks")
    print(document(eager, graphs))
    draw(options.picture, eager, graphs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
