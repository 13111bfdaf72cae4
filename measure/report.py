#!/usr/bin/env python3
"""A results folder as one HTML file that explains itself.

    python -m measure.report results_ddp/20261121_120000                writes report.html there
    python -m measure.report results/run_20261121_120000 --output r.html

It holds tables of step times with their spread, ratios with their intervals, memory; the pictures
of the folder, each with a sentence on what to read off; what failed and why; hardware, versions,
settings and commands. It needs no other file and no network, and prints.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from measure.command_line import Parser, refuse
from measure.files import write_atomically
from measure.picture import read_picture
from measure.report_page import details, element, facts, figure, note, page, table
from measure.report_tables import (
    MEMORY,
    PARTS,
    TIMES,
    Table,
    failure_table,
    memory_table,
    part_table,
    time_table,
)
from measure.report_text import environment, findings, settings, subtitle
from measure.results import OK
from measure.runs import BASELINES, SECTION, Cell, read_cells

PROGRAM = "measure.report"
FILE = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for what is no results folder."""
    parser = Parser(prog=PROGRAM, description=__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="with results.jsonl, or *_result.json files"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the report (default: {FILE} in FOLDER)"
    )
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.folder, options.output))
    except (ValueError, OSError) as error:
        return refuse(PROGRAM, error)
    return 0


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a results folder, whole or not at all; its path.

    Raises:
        ValueError: the folder has no results, or something else.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name the folder that it lies in")
    path = folder / FILE if output is None else Path(output)
    write_atomically(path, render(folder).encode("utf-8", "replace"))
    return path


def say_report(folder: str | Path) -> str:
    """Write the report at the end of a run: the line that says where it is, or why there is none.

    What has been measured is there in any case, so nothing is raised.
    """
    try:
        return f"report: {write_report(folder)}"
    except (ValueError, OSError) as error:
        return f"no report: {' '.join(str(error).split())}"


def render(folder: Path) -> str:
    """The page, from nothing but what the folder contains."""
    cells = _ordered(read_cells(folder))
    good = [cell for cell in cells if cell.status == OK]
    sections = [
        ("At a glance", [element("ul", *(element("li", line) for line in findings(cells)))]),
        ("Step time", _tables(cells, time_table, "Step time", TIMES)),
        ("Parts of a step", _tables(good, part_table, "Parts of a step", PARTS)),
        ("Memory and exchange", _tables(good, memory_table, "Memory", MEMORY)),
        ("Pictures", _pictures(folder)),
        ("What was not measured", _failures(cells)),
        ("Environment", [facts(environment(cells))]),
        ("Settings", [note("What all cells have in common."), facts(settings(cells))]),
        ("Commands", _commands(cells)),
        ("As text", _texts(folder, cells)),
    ]
    title = f"Step time and memory: {folder.resolve().name}"
    return page(title, subtitle(cells), [s for s in sections if s[1]])


def _ordered(cells: Sequence[Cell]) -> list[Cell]:
    """By length, then what others are compared with, then as it came; modes of one together."""
    first = [next(iter(cell.names.items())) for cell in cells]

    def place(cell: Cell) -> tuple[int, bool, int]:
        name, value = next(iter(cell.names.items()))
        is_floor = value == BASELINES[name][0]
        return cell.names.get(SECTION, 0), not is_floor, first.index((name, value))

    return sorted(cells, key=place)


def _tables(
    cells: Sequence[Cell], make: Callable[[Sequence[Cell]], Table], label: str, legend: str
) -> list[Element]:
    """One for each length of samples, below what their columns mean; none that is empty."""
    found = []
    for length in dict.fromkeys(cell.names.get(SECTION) for cell in cells):
        columns, rows = make([c for c in cells if c.names.get(SECTION) == length])
        if rows and length is not None:
            found.append(element("h3", f"{length:,} tokens a sample"))
        found += [table(columns, rows, label)] if rows else []
    return [note(legend), *found] if found else []


def _failures(cells: Sequence[Cell]) -> list[Element]:
    columns, rows = failure_table(cells)
    legend = (
        "Each attempt that failed, or could not be made here; others of a cell may have gone well."
    )
    return [note(legend), table(columns, rows, "Failures")] if rows else []


def _pictures(folder: Path) -> list[Element]:
    paths = [*sorted(folder.glob("*.png")), *sorted(folder.glob("*/*.png"))]
    return [figure(read_picture(path), path.stem.replace("_", " ")) for path in paths]


def _commands(cells: Sequence[Cell]) -> list[Element]:
    """Each once, by the date of its first row."""
    dates: dict[tuple[str, ...], str] = {}
    for cell in cells:
        for command, date in cell.commands.items():
            dates[command] = min(date, dates.get(command, date))
    ordered = sorted(dates, key=lambda command: dates[command])
    return [element("pre", shlex.join(command), class_="command") for command in ordered]


def _texts(folder: Path, cells: Sequence[Cell]) -> list[Element]:
    """Plans of fused kernels, and the summary that the program has printed."""
    plans: dict[str, list[str]] = {}
    for cell in cells:
        if plan := cell.facts.get("plan"):
            plans.setdefault(str(plan), []).append(cell.label)
    found = [details(f"Plan of {'; '.join(names)}", plan) for plan, names in plans.items()]
    summary = folder / "summary.txt"
    if summary.is_file():
        found.append(details("summary.txt", summary.read_text(errors="replace")))
    return found


if __name__ == "__main__":
    sys.exit(main())
