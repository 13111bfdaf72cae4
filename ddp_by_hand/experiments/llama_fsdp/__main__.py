#!/usr/bin/env python3
"""Measures private training of a Llama under FSDP2, by mode and length; see `run`."""

from __future__ import annotations

import sys
from pathlib import Path

from ddp_by_hand.experiments.llama_fsdp.cell import work, write_result
from ddp_by_hand.experiments.llama_fsdp.options import DESCRIPTION, EXAMPLES, PROGRAM, Options
from ddp_by_hand.experiments.llama_fsdp.plan import describe_plan, run_of, say_reference_modes
from ddp_by_hand.experiments.llama_fsdp.results import (
    GridCell,
    merge,
    read_grid,
    summarize_run,
)
from ddp_by_hand.experiments.llama_fsdp.run import Run, Start, check_model, from_first
from ddp_by_hand.lm.runtime import find_hardware, launched, launched_rank
from ddp_by_hand.measure import OK, describe_failure, summarize, write_atomically
from ddp_by_hand.measure.command_line import bad_input, check_file
from ddp_by_hand.measure.options import program
from ddp_by_hand.measure.report import say_report

NEEDS = ("transformers", "matplotlib", "jinja2")


@program(PROGRAM, Options, description=DESCRIPTION, epilog=EXAMPLES, needs=NEEDS)
def main(options: Options) -> int:
    """Runs the grid. Returns 1 if a cell failed."""
    with bad_input():
        if options.redraw:
            return redraw(options.redraw) if launched_rank() == 0 else 0
        run = run_of(options, find_hardware(options.device, options.num_processes))
        if options.mode and launched():  # a rank of a cell: its launcher has checked the rest
            (cell,) = run.cells
            return work(cell, run.settings, run.hardware, output_of(run, cell))
        if launched_rank() == 0 and options.output:
            check_file("--output", options.output)
        elif launched_rank() == 0:
            run.check(run.differs)
        check_model(options.model_name, weights=not options.dry_run)
    if options.dry_run:
        if launched_rank() == 0:
            print(describe_plan(run))
        return 0
    return from_first(run_one if options.mode else run_grid, run)


def output_of(run: Run, cell: GridCell) -> Path:
    return run.options.output or run.folder / cell.file


def run_one(run: Run, start: Start) -> int:
    (cell,) = run.cells
    if reference := say_reference_modes([cell.mode], run.hardware.device_type):
        print(reference, flush=True)
    result = run.measure(cell, start, output_of(run, cell))
    print(f"{describe(cell, result)}; {output_of(run, cell)}")
    return int(result["status"] != OK)


def run_grid(run: Run, start: Start) -> int:
    """Runs every unfinished cell, then writes pictures and summary. Returns 1 if a cell failed."""
    if references := say_reference_modes((c.mode for c in run.todo), run.hardware.device_type):
        print(references, flush=True)

    def recorded(cell: GridCell, rows: list[dict]) -> None:
        write_result(run.folder / cell.file, _all_rounds(rows, cell, run))

    rows = run.measure_all(start, describe, recorded)
    redraw(run.folder)
    print()
    print((run.folder / "summary.txt").read_text())
    return int(any(row["status"] != OK for row in rows))


def redraw(folder: Path) -> int:
    """Draws pictures and writes summary and report again, from finished results."""
    from ddp_by_hand.experiments.llama_fsdp.plots import draw

    cells = read_grid(folder)
    write_atomically(folder / "summary.txt", summarize_run(cells))
    paths = draw(cells, folder / "visualizations")
    print(f"{folder}: summary.txt, {', '.join(path.name for path in paths)}")
    print(say_report(folder))
    return 0


def _all_rounds(rows: list[dict], cell: GridCell, run: Run) -> dict:
    """Merges every round of the cell's mode and length on these devices into one result."""
    own = []
    for row in rows:
        where = GridCell(row["mode"], row["seq_length"], row["rounds"][0]["round"])
        if where.place == cell.place and row["key"] == run.key_of(where):
            own.append(row)
    found = merge(own)
    del found["key"]
    return found


def describe(cell: GridCell, result: dict) -> str:
    if result["status"] != OK:
        return f"{cell.label}: {describe_failure(result)}"
    step = summarize(result["rounds"][-1]["step_ms"])
    peak = result["peak_memory_gb"]
    memory = "" if peak is None else f", {peak:.2f} GiB"
    return f"{cell.label}: {step.median:.1f} ms per step{memory}"


if __name__ == "__main__":
    sys.exit(main())
