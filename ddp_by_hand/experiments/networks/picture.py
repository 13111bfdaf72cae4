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
Steps = dict[tuple[str, str], list[dict[str, Any]]]  # of a network and a variant, by round


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
    """Returns the cells of a run. Raises ValueError if it is none."""
    found: Steps = {}
    try:
        for cell in sorted(json.loads(path.read_text())["cells"], key=lambda c: c["round"]):
            found.setdefault((cell["row"], cell["variant"]), []).append(cell)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no results of experiments.networks: {error!r}") from None
    return found


def ratios(steps: Steps, row: str, variant: str, key: str = "step_ms") -> list[float]:
    """Returns how a variant's median compares with the ordinary step's, in each round."""
    pairs = zip(steps.get((row, variant), []), steps.get((row, BASELINE), []), strict=False)
    return [
        _median(ours, key) / _median(ordinary, key)
        for ours, ordinary in pairs
        if ours["status"] == ordinary["status"] == OK and key in ours  # kernels: of one round
    ]


def _median(cell: dict[str, Any], key: str) -> float:
    return statistics.median(cell[key]) if isinstance(cell[key], list) else cell[key]


def ratio(steps: Steps, row: str, variant: str, key: str = "step_ms") -> float | None:
    """Returns the median of `ratios`; None if no round has both."""
    found = ratios(steps, row, variant, key)
    return statistics.median(found) if found else None


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
    for place, row in enumerate(rows):
        if found := ratios(eager, row, OURS):
            axes.plot([min(found), max(found)], [place, place], color=GREEN, lw=1.2, zorder=1)
    axes.plot(here, range(len(rows)), "o", mfc="white", mec=GREEN, mew=1.6, ms=6, ls="none",
              label="here, eager (Python's time included; line: rounds)")  # fmt: skip
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
    """Returns the table as Markdown: milliseconds ordinary / private, and their ratio.

    With several rounds these are medians of them, and the least and the largest ratio follow.
    """

    def pair(steps: Steps, row: str) -> str:
        found = ratios(steps, row, OURS)
        if not found:
            return "–"
        both = ([c for c in steps[row, v] if c["status"] == OK] for v in (BASELINE, OURS))
        medians = (statistics.median(_median(c, "step_ms") for c in cells) for cells in both)
        text = " / ".join(f"{ms:.1f}" for ms in medians)
        text += f", {statistics.median(found):.2f}"
        return text + (f" [{min(found):.2f}, {max(found):.2f}]" if len(found) > 1 else "")

    def one(row: str, variant: str, key: str) -> str:
        found = ratio(eager, row, variant, key)
        return "–" if found is None else f"{found:.2f}"

    table = [
        {
            "network, batch": f"`{row}`, " + cells[0]["config"]["batch"].replace(" x ", " × "),
            "graph": pair(graphs, row),
            "eager": pair(eager, row),
            "kernels": one(row, OURS, "kernel_ms"),
            "Opacus `hooks`": one(row, OPACUS[0], "step_ms"),
            "`ghost`": one(row, OPACUS[1], "step_ms"),
            "peak memory": " / ".join(one(row, v, "peak_memory_mb") for v in (OURS, *OPACUS)),
        }
        for row in ROWS
        if (cells := eager.get((row, BASELINE)))
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
