#!/usr/bin/env python3
"""Finds what bounds private training: a sweep over lengths, and one ranked verdict.

Each length is measured in processes of its own; one that runs out of memory or fails is a row like
the others. The same command with the same --output-dir measures the rest.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence

from ddp_by_hand.experiments.llama_fsdp.options import new_folder
from ddp_by_hand.experiments.llama_fsdp.results import MODES, GridCell, GridSettings
from ddp_by_hand.experiments.llama_fsdp.run import Run, Start, check_model, from_first
from ddp_by_hand.experiments.profile_bottlenecks.options import (
    DESCRIPTION,
    EXAMPLES,
    ON_CPU,
    ON_GPU,
    PROGRAM,
    Options,
)
from ddp_by_hand.experiments.profile_bottlenecks.verdict import (
    PHASES,
    as_json,
    bounds,
    described,
    growths,
    headline,
    in_words,
    measured,
    overhead,
)
from ddp_by_hand.lm.runtime import Hardware, find_hardware, launched, launched_rank
from ddp_by_hand.measure import (
    OK,
    OOM,
    Column,
    describe_failure,
    format_table,
    write_atomically,
)
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import program, shared_values
from ddp_by_hand.measure.report import say_report
from ddp_by_hand.measure.report_phases import phase_tables
from ddp_by_hand.measure.report_tables import wide_table
from ddp_by_hand.measure.runs import cells_of

LAYERS_SHOWN = 5
MIB_OF_GIB = 1024
NEEDS = ("transformers", "matplotlib", "jinja2")


@program(PROGRAM, Options, description=DESCRIPTION, epilog=EXAMPLES, needs=NEEDS)
def main(options: Options) -> int:
    """Runs the sweep. Returns 1 if a length failed, not by lack of memory."""
    with bad_input():
        hardware = find_hardware("cpu" if options.cpu else "auto", options.num_processes)
        run = run_of(options, hardware)
        if options.length and launched():
            return one_rank(run)
        if launched_rank() == 0:
            run.check(lambda row: _another(row, run))
        check_model(run.settings.model_name)
    return from_first(sweep, run)


def run_of(options: Options, hardware: Hardware) -> Run:
    """Fills in the defaults that depend on the machine."""
    on_gpu = hardware.device_type == "cuda"
    name = options.model_name or ("llama-3.2-1b" if on_gpu else "tiny")
    settings = shared_values(options, GridSettings, model_name=name, enable_profiling=True)
    lengths = [options.length] if options.length else options.seq_lengths
    cells = [GridCell(options.mode, n) for n in sorted(lengths or (ON_GPU if on_gpu else ON_CPU))]
    folder = options.output_dir or new_folder("bottlenecks")
    return Run(PROGRAM, options, cells, settings, folder, hardware)


def _another(row: dict, run: Run) -> str:
    """Says which other experiment a row belongs to; empty if it belongs to this one."""
    mode = run.cells[0].mode
    if row.get("mode") != mode:
        return f"mode {MODES.get(row.get('mode'), 'none')}, not {MODES[mode]}"
    return run.differs(row)


def one_rank(run: Run) -> int:
    from ddp_by_hand.experiments.llama_fsdp.cell import work
    from ddp_by_hand.experiments.profile_bottlenecks.cell import measure

    (cell,) = run.cells
    return work(cell, run.settings, run.hardware, run.options.output, measure)


def sweep(run: Run, start: Start) -> int:
    """Runs every unfinished length, then writes picture and verdict. Returns the exit status."""
    rows = run.measure_all(start, lambda cell, row: describe(row))
    report(rows, run)
    return int(any(row["status"] not in (OK, OOM) for row in rows) or not measured(rows))


def report(rows: Sequence[dict], run: Run) -> None:
    """Writes summary, verdict, picture and report, then prints them.

    Files come first, because output may have no reader.
    """
    folder, limit_gb = run.folder, run.options.memory_limit_gb
    limit = limit_gb and limit_gb * MIB_OF_GIB
    text = summarize(rows, limit)
    write_atomically(folder / "summary.txt", text + "\n")
    if measured(rows):
        from ddp_by_hand.experiments.profile_bottlenecks.plot import draw

        write_atomically(folder / "verdict.json", json.dumps(as_json(rows, limit), indent=1) + "\n")
        draw(rows, limit, folder / "bottlenecks.png")
    drawn = "verdict.json, bottlenecks.png, " if measured(rows) else ""
    written = say_report(folder)
    print(f"\n{text}\n\n{folder}: summary.txt, {drawn}results.jsonl\n{written}")


def summarize(rows: Sequence[dict], limit_mb: float | None) -> str:
    """Formats tables, exponents and the verdict."""
    cells, good = cells_of(rows), measured(rows)
    legend = (
        "Milliseconds per step. Phases and their sum are medians on rank 0 with profiling; times "
        "above are of the slowest rank without. Shares of the verdict are of the sum; on a GPU, of "
        "the part in which it works and of what it idles without profiling. Not covered by epsilon."
    )
    lines = [f"Bottlenecks of {described(rows)}", "", format_table(*wide_table(cells)), ""]
    if not good:
        return "\n".join([*lines, "No length could be measured: shorter ones, --seq-lengths."])
    lines += [format_table(*table) for _, table in phase_tables(cells)]
    lines += ["", *textwrap.wrap(legend, 100), ""]
    lines += ["Growth with the length T (exponent, 95 % interval by Student's t):"]
    whole = {name: g for name, g in growths(rows).items() if name not in PHASES}
    found = [f"  {name}: {growth}" for name, growth in whole.items()]
    lines += found or ["  of one length nothing is known; give more, --seq-lengths"]
    layers = sorted(good[-1]["layer_norm_ms"].items(), key=lambda item: -item[1])[:LAYERS_SHOWN]
    shown = [{"layers": _short(name), "norm ms": ms} for name, ms in layers]
    lines += ["", format_table(
        ["layers", Column("norm ms", format=".3f")], shown,
        title=f"Slowest norms at {good[-1]['seq_length']} tokens",
    )]  # fmt: skip
    lines += ["", verdict(rows, limit_mb)]
    return "\n".join([*lines, switch_cost(good[-1])])


def switch_cost(row: dict) -> str:
    """Says in a sentence what the profiling switch costs.

    Without warm-up it cannot be measured: first steps are slow either way.
    """
    if not row["config"]["warmup_iter"]:
        return "What the profiling switch costs is not measurable without warm-up: --warmup-iter."
    return f"The profiling switch cost {overhead(row) - 1:+.1%} of a step there."


def verdict(rows: Sequence[dict], limit_mb: float | None) -> str:
    """Formats what bounds the longest measured length; the first line is the answer."""
    found = bounds(rows, limit_mb)
    head = f"Verdict: {headline(rows, limit_mb)}"
    return "\n".join([head, *(f"  {number}. {one}" for number, one in enumerate(found, 1))])


def describe(row: dict) -> str:
    """Returns one line of progress."""
    if row["status"] != OK:
        return f"{row['seq_length']} tokens: {describe_failure(row)}"
    name = in_words(bounds([row])[0].name)
    return f"{row['seq_length']} tokens: {row['median_time_ms']:.1f} ms per step, bound by {name}"


def _short(name: str) -> str:
    first, *others = name.split("+")
    return f"{first} and {len(others)} more" if others else first


if __name__ == "__main__":
    sys.exit(main())
