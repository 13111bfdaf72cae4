#!/usr/bin/env python3
"""A results folder as one HTML file that explains itself.

    python -m ddp_by_hand.measure.report results_ddp/20261121_120000  writes report.html there
    python -m ddp_by_hand.measure.report results/run_20261121_120000 --output r.html

It holds tables of step times with their spread, ratios with their intervals, phases and memory
where they were measured; the pictures of the folder, each with a sentence on what to read off; what
failed and why; hardware, versions, settings and commands. It needs no other file and no network,
and prints.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_by_hand.measure.command_line import BadInput, bad_input
from ddp_by_hand.measure.files import write_atomically
from ddp_by_hand.measure.options import option, program
from ddp_by_hand.measure.picture import read_picture
from ddp_by_hand.measure.report_page import Block, page, table
from ddp_by_hand.measure.report_phases import PHASES_LEGEND, phase_tables
from ddp_by_hand.measure.report_tables import (
    PARTS_LEGEND,
    Table,
    failure_table,
    memory_heading,
    memory_legend,
    memory_table,
    part_table,
    time_legend,
    time_table,
)
from ddp_by_hand.measure.report_text import environment, findings, settings, subtitle
from ddp_by_hand.measure.results import OK
from ddp_by_hand.measure.runs import BASELINES, ORDER, SECTION, Cell, read_cells

FILE = "report.html"


@dataclass(frozen=True)
class Options:
    folder: Path = option(
        metavar="FOLDER",
        help="whose results are shown: results.jsonl or *_result.json files, and pictures",
    )
    output: Path | None = option(
        None, f"where the report is written (default: {FILE} in FOLDER)", metavar="FILE"
    )


@program("ddp_by_hand.measure.report", Options, needs=["matplotlib", "jinja2"])
def main(options: Options) -> int:
    """Writes a report."""
    with bad_input():
        text = render(options.folder)
    path = options.output or options.folder / FILE
    try:
        _save(path, text)
    except OSError as error:
        how = f"cannot be written ({error.strerror}), name another file with --output"
        raise BadInput(f"{path}: {how}") from error
    print(path)
    return 0


def write_report(folder: str | Path) -> Path:
    """Writes the report into its results folder, whole or not at all; returns its path.

    Raises:
        ValueError: the folder has no results, or something else.
        OSError: it cannot be written.
    """
    path = Path(folder) / FILE
    _save(path, render(Path(folder)))
    return path


def _save(path: Path, text: str) -> None:
    write_atomically(path, text.encode("utf-8", "replace"))


def say_report(folder: str | Path) -> str:
    """Writes the report; returns the line that says where it is, or why there is none.

    It is for the end of a run: what was measured is there in any case, so nothing is raised.
    """
    try:
        return f"report: {write_report(folder)}"
    except (ValueError, OSError) as error:
        return f"no report: {' '.join(str(error).split())}"


def render(folder: Path) -> str:
    """Returns the page, from nothing but what the folder contains.

    Raises:
        ValueError: it has no results, or something else.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name the folder that it lies in")
    cells = _ordered(read_cells(folder))
    good = [cell for cell in cells if cell.status == OK]
    memory = memory_heading(good)
    sections = [
        ("At a glance", [*_verdict(folder), ("list", findings(cells))]),
        ("Step time", _tables(cells, time_table, "Step time", time_legend(cells))),
        ("Parts of a step", _parts(good)),
        ("Phases", _phases(cells)),
        (memory, _tables(good, memory_table, memory, memory_legend(good))),
        ("Pictures", _pictures(folder)),
        ("Not measured", _failures(cells)),
        ("Environment", [("facts", environment(cells))]),
        ("Settings", [("note", "What all cells have in common."), ("facts", settings(cells))]),
        ("Commands", _commands(cells)),
        ("As text", _texts(folder, cells)),
    ]
    title = f"Step time and memory: {folder.resolve().name}"
    return page(title, subtitle(cells), [s for s in sections if s[1]])


def _verdict(folder: Path) -> list[Block]:
    """Returns the `headline` and `ranked` sentences of `verdict.json`, where there is one.

    Raises:
        ValueError: it is something else.
    """
    path = folder / "verdict.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text())
        headline, ranked = found.get("headline"), list(found.get("ranked", ()))
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{path}: not a verdict; remove it, and run the program again") from None
    if headline is None:  # of another program
        return []
    return [("headline", headline), ("ranking", ranked)]


def _ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Sorts by length, then baselines first, then `ORDER`, then by first appearance."""
    first = [next(iter(cell.names.items())) for cell in cells]

    def place(cell: Cell) -> tuple[int, bool, int, int]:
        name, value = next(iter(cell.names.items()))
        is_floor = value == BASELINES[name][0]
        usual = ORDER.index(value) if value in ORDER else len(ORDER)
        return cell.names.get(SECTION, 0), not is_floor, usual, first.index((name, value))

    return sorted(cells, key=place)


def _tables(
    cells: Sequence[Cell], make: Callable[[Sequence[Cell]], Table], label: str, legend: str
) -> list[Block]:
    """Returns the legend and a table for each length of samples; nothing if all are empty."""
    found = []
    for length in dict.fromkeys(cell.names.get(SECTION) for cell in cells):
        columns, rows = make([c for c in cells if c.names.get(SECTION) == length])
        if rows and length is not None:
            found.append(("heading", f"{length:,} tokens per sample"))
        found += [table(columns, rows, label)] if rows else []
    return [("note", legend), *found] if found else []


def _parts(cells: Sequence[Cell]) -> list[Block]:
    columns, rows = part_table(cells) if cells else ([], [])
    return [("note", PARTS_LEGEND), table(columns, rows, "Parts of a step")] if rows else []


def _phases(cells: Sequence[Cell]) -> list[Block]:
    found = phase_tables(cells)
    titled = len(found) > 1
    made = []
    for name, (columns, rows) in found:
        made += [("heading", name)] if titled else []
        made.append(table(columns, rows, f"Phases of {name}"))
    return [("note", PHASES_LEGEND), *made] if made else []


def _failures(cells: Sequence[Cell]) -> list[Block]:
    columns, rows = failure_table(cells)
    legend = (
        "Each attempt that failed, or could not be made here; others of a cell may have gone well."
    )
    return [("note", legend), table(columns, rows, "Failures")] if rows else []


def _pictures(folder: Path) -> list[Block]:
    paths = [*sorted(folder.glob("*.png")), *sorted(folder.glob("*/*.png"))]
    return [
        ("figure", {"name": path.stem.replace("_", " "), **vars(read_picture(path))})
        for path in paths
    ]


def _commands(cells: Sequence[Cell]) -> list[Block]:
    """Returns each command once, by the date of its first row."""
    dates: dict[tuple[str, ...], str] = {}
    for cell in cells:
        for command, date in cell.commands.items():
            dates[command] = min(date, dates.get(command, date))
    ordered = sorted(dates, key=lambda command: dates[command])
    return [("command", shlex.join(command)) for command in ordered]


def _texts(folder: Path, cells: Sequence[Cell]) -> list[Block]:
    """Returns the plans of fused kernels, and the summary that the program has printed."""
    plans: dict[str, list[str]] = {}
    for cell in cells:
        if plan := cell.facts.get("plan"):
            plans.setdefault(str(plan), []).append(cell.label)
    found = [(f"Plan of {'; '.join(names)}", plan) for plan, names in plans.items()]
    summary = folder / "summary.txt"
    if summary.is_file():
        found.append(("summary.txt", summary.read_text(errors="replace")))
    return [("details", title_and_text) for title_and_text in found]


if __name__ == "__main__":
    sys.exit(main())
