"""Runs `experiments.profile_bottlenecks`: a sweep over lengths, and one ranked verdict.

Each length is measured in processes of its own; one that runs out of memory or fails is a row like
the others. The same command with the same --output-dir measures the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from experiments.llama_fsdp.grid import Start, from_first, run_cell
from experiments.llama_fsdp.network import SHAPES, config_of, files_of, without_token
from experiments.llama_fsdp.results import MODES, GridCell, GridSettings, differs
from experiments.profile_bottlenecks.options import (
    PROGRAM,
    Options,
    cell_command,
    complete,
    mode_of,
    parse,
    settings_of,
)
from experiments.profile_bottlenecks.verdict import (
    PHASES,
    as_json,
    bounds,
    described,
    growths,
    headline,
    in_words,
    measured,
    overhead,
    profiled_ms,
)
from lm.launch import INTERRUPTED
from lm.runtime import (
    Hardware,
    find_hardware,
    is_first_of_host,
    launched,
    launched_rank,
    launched_world_size,
)
from measure import OK, OOM, Column, Results, format_table, write_atomically
from measure.command_line import check_folder, ending_quietly, is_alone, refuse
from measure.report import say_report
from measure.words import counted

LAYERS_SHOWN = 5
MIB_OF_GIB = 1024


@ending_quietly(speaks=is_alone)
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep. Returns 0, 1 (a length failed, not by lack of memory) or 2 (bad input)."""
    options = parse(arguments)
    try:
        hardware = find_hardware("cpu" if options.cpu else "auto", options.num_processes)
        options = complete(options, hardware)
        if options.length and launched():
            return one_rank(options, hardware)
        size = launched_world_size() if launched() else hardware.num_processes
        if launched_rank() == 0:
            config_of(options.model_name)
            check_results(options, size)
            if options.model_name not in SHAPES:
                files_of(options.model_name)
    except (ValueError, OSError) as error:
        return refuse(PROGRAM, without_token(str(error)), speaks=is_first_of_host())
    try:
        return from_first(lambda start: sweep(options, hardware, size, start), hardware)
    except KeyboardInterrupt:
        print(f"interrupted: the same command with --output-dir {options.output_dir} resumes",
              file=sys.stderr)  # fmt: skip
        return INTERRUPTED


def check_results(options: Options, world_size: int) -> None:
    """Raises ValueError if the folder cannot be written, or holds results of something else: they
    would be tabled and fitted together."""
    folder, settings, mode = options.output_dir, settings_of(options), mode_of(options)
    check_folder("--output-dir", folder, create=False)
    for row in Results(folder).rows():
        if what := _another(row, mode, settings, world_size):
            raise ValueError(f"--output-dir {folder} holds results of {what}; name another folder")


def _another(row: dict, mode: str, settings: GridSettings, world_size: int) -> str:
    """Says which other experiment a row belongs to; empty if it belongs to this one."""
    if row.get("mode") != mode:
        return f"mode {MODES.get(row.get('mode'), 'none')}, not {MODES[mode]}"
    return differs(settings, world_size, row)


def one_rank(options: Options, hardware: Hardware) -> int:
    from experiments.llama_fsdp.cell import work
    from experiments.profile_bottlenecks.cell import measure

    cell = GridCell(mode_of(options), options.length)
    return work(cell, settings_of(options), hardware, options.output, measure)


def sweep(options: Options, hardware: Hardware, world_size: int, start: Start) -> int:
    """Runs every unfinished length, then writes picture and verdict. Returns the exit status."""
    folder, settings = options.output_dir, settings_of(options)
    results = Results(folder)
    device = "cpu" if hardware.device_type == "cpu" else torch.cuda.get_device_name(0)
    cells = [GridCell(mode_of(options), length) for length in options.seq_lengths]
    keys = {cell.key(settings, world_size, device, torch.__version__): cell for cell in cells}
    todo = {key: cell for key, cell in keys.items() if not results.finished(key)}
    if done := len(keys) - len(todo):
        verb = "is" if len(keys) == 1 else "are"
        print(f"{done} of {counted(len(keys), 'length')} {verb} finished in {folder}", flush=True)
    for number, (key, cell) in enumerate(todo.items(), 1):
        row = {"key": key, **run_length(options, cell, hardware, world_size, start)}
        results.record({**row, "command": options.typed})
        print(f"[{number}/{len(todo)}] {describe(row)}", flush=True)
    newest = {row["key"]: row for row in results.rows()}
    rows = [newest[key] for key in keys]
    report(rows, options)
    return int(any(row["status"] not in (OK, OOM) for row in rows) or not measured(rows))


def run_length(
    options: Options, cell: GridCell, hardware: Hardware, world_size: int, start: Start
) -> dict:
    """Runs one length and returns its result, also that of a failure."""
    output = options.output_dir / ".cell.json"
    words = cell_command(options, cell.seq_length, output)
    row = run_cell(words, cell, settings_of(options), hardware, world_size, start, output)
    output.unlink()
    return row


def report(rows: Sequence[dict], options: Options) -> None:
    """Writes summary, verdict, picture and report, then prints them.

    Files come first, because output may have no reader.
    """
    folder = options.output_dir
    limit = options.memory_limit_gb and options.memory_limit_gb * MIB_OF_GIB
    text = summarize(rows, limit)
    write_atomically(folder / "summary.txt", text + "\n")
    if measured(rows):
        from experiments.profile_bottlenecks.plot import draw

        write_atomically(folder / "verdict.json", json.dumps(as_json(rows, limit), indent=1) + "\n")
        draw(rows, limit, folder / "bottlenecks.png")
    drawn = "verdict.json, bottlenecks.png, " if measured(rows) else ""
    written = say_report(folder)
    print(f"\n{text}\n\n{folder}: summary.txt, {drawn}results.jsonl\n{written}")


def summarize(rows: Sequence[dict], limit_mb: float | None) -> str:
    """Formats tables, exponents and the verdict."""
    table = [
        {
            "tokens": row["seq_length"], "status": row["status"], "reason": row["reason"],
            "total": row["median_time_ms"], "MiB": row["peak_memory_mb"],
            **row.get("phases_ms", {}),
            "sum": profiled_ms(row) if row["status"] == OK else None,
        }
        for row in rows
    ]  # fmt: skip
    there = [name for name in PHASES if any(name in row for row in table)]
    columns = [Column("tokens", right=True), *(_ms(n) for n in [*there, "sum", "total"])]
    columns.append(Column("MiB", format=",.0f", right=True))
    lines = [
        f"Bottlenecks of {described(rows)}",
        "Milliseconds per step, medians: phases and their sum on rank 0 with profiling, total of "
        "the slowest rank without. Shares are of the sum; on a GPU, of the part in which it works "
        "and of what it idles without profiling. Not covered by epsilon.", "",
        format_table(columns, table), "",
    ]  # fmt: skip
    good = measured(rows)
    if not good:
        return "\n".join([*lines, "No length could be measured: shorter ones, --seq-lengths."])
    lines += ["Growth with the length T (exponent, 95 % interval by Student's t):"]
    found = [f"  {name}: {growth}" for name, growth in growths(rows).items()]
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
        return f"{row['seq_length']} tokens: {row['status']}: {row['reason']}"
    name = in_words(bounds([row])[0].name)
    return f"{row['seq_length']} tokens: {row['median_time_ms']:.1f} ms per step, bound by {name}"


def _ms(name: str) -> Column:
    return Column(name, format=".1f", right=True)


def _short(name: str) -> str:
    first, *others = name.split("+")
    return f"{first} and {len(others)} more" if others else first
