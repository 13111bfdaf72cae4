"""Draws what a private step costs on every network, from runs of `experiments.networks`.

    python -m ddp_by_hand.experiments.networks.picture                       those of docs/cost.md
    python -m ddp_by_hand.experiments.networks.picture --eager eager.json --graphs graphs.json

Files are what `--output` of `experiments.networks` wrote: without and with --cuda-graph, of the
same networks on the same machine. The same is printed as a table for a document. Needs no GPU.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_by_hand.experiments.networks.__main__ import OPACUS
from ddp_by_hand.experiments.networks.rows import ROWS
from ddp_by_hand.experiments.rounds import BASELINE
from ddp_by_hand.measure import OK
from ddp_by_hand.measure.command_line import check_file, ending_quietly, refuse
from ddp_by_hand.measure.options import option, parse_options
from ddp_by_hand.measure.picture import FAINT, INK, frame, new_figure, save_picture
from ddp_by_hand.measure.table import format_table

PROGRAM = "ddp_by_hand.experiments.networks.picture"
OURS = "flash_bookkeeping"
TITLE = "How much longer a private step takes than an ordinary one"
GREEN, ORANGE, RED = "#2A7F4F", "#E08A1E", "#B5382A"
MARKS = {
    "opacus_hooks": ("s", ORANGE, "Opacus, hooks"),
    "opacus_ghost": ("D", RED, "Opacus, ghost"),
}

RESULTS = Path("results/networks-1xh200")
Steps = dict[tuple[str, str], dict[str, Any]]  # of a network and a variant


# fmt: off
@dataclass(frozen=True)
class Options:
    eager: Path = option(RESULTS / "eager.json", "results of eager steps", metavar="JSON")
    graphs: Path = option(RESULTS / "graphs.json", "results with --cuda-graph", metavar="JSON")
    picture: Path = option(Path("networks.png"), "is written", metavar="FILE")
# fmt: on

    def __post_init__(self) -> None:
        check_file("--picture", self.picture)


def steps_of(path: Path) -> Steps:
    """Returns the cells of a run's first round. Raises ValueError if it is none."""
    try:
        cells = json.loads(path.read_text())["cells"]
        return {(c["row"], c["variant"]): c for c in cells if c["round"] == 0}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no results of experiments.networks: {error!r}") from None


def ratio(steps: Steps, row: str, variant: str, key: str = "step_ms") -> float | None:
    """Returns how a variant's median compares with the ordinary step's; None if one has none."""
    cells = [steps.get((row, name), {}) for name in (variant, BASELINE)]
    if any(cell.get("status") != OK for cell in cells):
        return None
    ours, ordinary = (
        statistics.median(c[key]) if isinstance(c[key], list) else c[key] for c in cells
    )
    return ours / ordinary


def draw(path: Path, eager: Steps, graphs: Steps) -> None:
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
    axes.plot(here, range(len(rows)), "o", mfc="white", mec=GREEN, mew=1.6, ms=6, ls="none",
              label="here, eager (Python's time included)")  # fmt: skip
    for variant, (mark, colour, label) in MARKS.items():
        found = [ratio(eager, row, variant) for row in rows]
        axes.plot(found, range(len(rows)), mark, color=colour, ms=5, ls="none", label=label)
    for place, row in enumerate(rows):
        if not any(ratio(eager, row, variant) for variant in OPACUS):
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


def document(eager: Steps, graphs: Steps) -> str:
    """Returns the table as Markdown: milliseconds ordinary / private, and their ratio."""

    def pair(steps: Steps, row: str) -> str:
        found = ratio(steps, row, OURS)
        if found is None:
            return "–"
        both = (statistics.median(steps[row, v]["step_ms"]) for v in (BASELINE, OURS))
        return " / ".join(f"{ms:.1f}" for ms in both) + f", {found:.2f}"

    def one(row: str, variant: str, key: str) -> str:
        found = ratio(eager, row, variant, key)
        return "–" if found is None else f"{found:.2f}"

    table = [
        {
            "network, batch": f"`{row}`, " + cell["config"]["batch"].replace(" x ", " × "),
            "graph": pair(graphs, row),
            "eager": pair(eager, row),
            "kernels": one(row, OURS, "kernel_ms"),
            "Opacus `hooks`": one(row, OPACUS[0], "step_ms"),
            "`ghost`": one(row, OPACUS[1], "step_ms"),
            "peak memory": " / ".join(one(row, v, "peak_memory_mb") for v in (OURS, *OPACUS)),
        }
        for row in ROWS
        if (cell := eager.get((row, BASELINE)))
    ]
    return format_table(list(table[0]), table, markdown=True)


@ending_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the picture. Returns 0, or 2 without such results."""
    options = parse_options(Options, arguments, prog=PROGRAM, description=__doc__)
    try:
        eager, graphs = steps_of(options.eager), steps_of(options.graphs)
        if not any((row, BASELINE) in eager for row in ROWS):
            raise ValueError(f"{options.eager}: no steps of these networks")
    except ValueError as error:
        return refuse(PROGRAM, error)
    print(document(eager, graphs))
    draw(options.picture, eager, graphs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
