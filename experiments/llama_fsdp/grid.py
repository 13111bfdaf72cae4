"""Measures private training of a Llama under FSDP2, by mode and length.

Each cell, a mode at a sequence length, is measured in processes of its own; one that runs out of
memory or fails is a row like the others. The same command with the same --output-dir measures the
rest; `--help` says what the results folder receives.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from experiments.llama_fsdp.left import TimeLeft
from experiments.llama_fsdp.network import SHAPES, config_of, files_of, without_token
from experiments.llama_fsdp.options import (
    PROGRAM,
    Options,
    cell_arguments,
    folder_of,
    output_of,
    parse,
    settings_of,
)
from experiments.llama_fsdp.plan import Plan, describe_plan, plan, say_reference_modes
from experiments.llama_fsdp.results import (
    GridCell,
    GridSettings,
    differs,
    merge,
    read_results,
    single_result,
    summarize_run,
)
from lm.launch import INTERRUPTED, Outcome, run_my_rank, run_ranks
from lm.runtime import (
    Hardware,
    connect_store,
    find_hardware,
    is_first_of_host,
    launched,
    launched_rank,
    launched_world_size,
)
from measure import OK, Progress, Results, duration, summarize, write_atomically
from measure.command_line import check_file, check_folder, ending_quietly, is_alone, refuse
from measure.report import say_report

A_DAY = timedelta(days=1)
Start = Callable[[list[str]], Outcome]


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", PROGRAM, *arguments]


# ---- run -----------------------------------------------------------------------------------------


@ending_quietly(speaks=is_alone)
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the grid. Returns 0, 1 (a cell failed), 2 (bad input) or 130 (Ctrl-C)."""
    options = parse(arguments)
    try:
        if options.redraw:
            return redraw(options.redraw) if launched_rank() == 0 else 0
        hardware = find_hardware(options.device, options.num_processes)
        if options.mode and launched():  # a rank of a cell: its launcher has checked the rest
            from experiments.llama_fsdp.cell import work

            cell = GridCell(options.mode, options.seq_length, options.round)
            return work(cell, settings_of(options), hardware, output_of(options, cell))
        world_size = launched_world_size() if launched() else hardware.num_processes
        if launched_rank() == 0 or options.dry_run:
            check(options, world_size)
        if is_first_of_host() and not options.dry_run and options.model_name not in SHAPES:
            files_of(options.model_name)  # before a cell's time without progress is counted
    except (ValueError, OSError) as error:
        return refuse(PROGRAM, without_token(str(error)), speaks=is_first_of_host())
    if options.dry_run:
        if launched_rank() == 0:
            print(describe_plan(options, hardware, world_size))
        return 0
    try:
        if options.mode:
            return from_first(lambda start: run_one(options, hardware, start), hardware)
        return from_first(lambda start: run_grid(options, hardware, world_size, start), hardware)
    except KeyboardInterrupt:
        folder = options.output or folder_of(options)
        print(f"interrupted: what is finished is in {folder}; the same command with "
              f"--output-dir {folder_of(options)} resumes", file=sys.stderr)  # fmt: skip
        return INTERRUPTED


def check(options: Options, world_size: int) -> None:
    """Checks the options before a worker starts.

    Raises:
        ValueError: the model cannot be had, or the folder cannot take results.
    """
    config_of(options.model_name)
    if options.output:
        check_file("--output", options.output)
        return
    folder = folder_of(options)
    check_folder("--output-dir", folder, create=False)
    for row in Results(folder).rows():  # refuses those of another version
        if what := differs(settings_of(options), world_size, row):
            raise ValueError(f"--output-dir {folder} holds results of {what}; name another folder")


def redraw(folder: Path) -> int:
    """Draws pictures and writes summary and report again, from finished results."""
    from experiments.llama_fsdp.plots import draw

    results = read_results(folder)
    write_atomically(folder / "summary.txt", summarize_run(results))
    paths = draw(results, folder / "visualizations")
    print(f"{folder}: summary.txt, {', '.join(path.name for path in paths)}")
    print(say_report(folder))
    return 0


# ---- one cell and the grid -----------------------------------------------------------------------


def run_one(options: Options, hardware: Hardware, start: Start) -> int:
    (cell,) = plan(options)
    if reference := say_reference_modes([cell.mode], hardware.device_type):
        print(reference, flush=True)
    output = output_of(options, cell)
    result = measure(cell, options, hardware, hardware.num_processes, start, output)
    print(f"{describe(cell, result)}; {output}")
    return int(result["status"] != OK)


def measure(
    cell: GridCell,
    options: Options,
    hardware: Hardware,
    world_size: int,
    start: Start,
    output: Path,
) -> dict:
    """Runs the cell in processes of its own and returns its result, also that of a failure."""
    words = command(cell_arguments(cell, options, output))
    return run_cell(words, cell, settings_of(options), hardware, world_size, start, output)


def run_cell(
    words: list[str],
    cell: GridCell,
    settings: GridSettings,
    hardware: Hardware,
    world_size: int,
    start: Start,
    output: Path,
) -> dict:
    """Runs the command `words` and returns the result in `output`, or that of the failure."""
    from experiments.llama_fsdp.cell import write_result

    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    outcome = start(words)
    if outcome.status == INTERRUPTED:
        raise KeyboardInterrupt
    if not output.exists():  # the rank that writes it was killed
        cause = outcome.cause
        reason = f"{cause.blame}{cause.message}" if cause else f"exit status {outcome.status}"
        result = single_result(
            cell, settings, hardware, world_size,
            status=cause.status if cause else "error", reason=reason,
        )  # fmt: skip
        write_result(output, result)
    return json.loads(output.read_text())


def run_grid(options: Options, hardware: Hardware, world_size: int, start: Start) -> int:
    """Runs every unfinished cell, then writes pictures and summary. Returns 1 if a cell failed."""
    from experiments.llama_fsdp.cell import write_result

    planned = Plan(options, hardware, world_size)
    folder, keys, todo = planned.folder, planned.keys, planned.todo
    results = Results(folder)
    if finished := planned.say_finished():
        print(finished)
    if references := say_reference_modes((cell.mode for cell in todo), hardware.device_type):
        print(references, flush=True)
    temporary = folder / ".cell.json"
    earlier = [row for row in results.rows() if row["key"] in keys.values()]
    time_left = TimeLeft(options.warmup_iter + options.num_iter, earlier)
    given_up: set[GridCell] = set()
    with Progress(len(todo)) as progress:
        for number, cell in enumerate(todo):
            place = replace(cell, round=0)
            coming = [c for c in todo[number:] if replace(c, round=0) not in given_up]
            progress.update(cell.label, time_left.of(coming))
            if place in given_up:  # what failed in this call would fail again
                continue
            began = time.monotonic()
            result = measure(cell, options, hardware, world_size, start, temporary)
            time_left.note(time.monotonic() - began, result)
            temporary.unlink()
            results.record({"key": keys[cell], **result, "command": options.typed})
            if result["status"] != OK:
                given_up.add(place)
            write_result(folder / cell.file, _all_rounds(results.rows(), cell, planned.key_of))
            progress.close()
            coming = [c for c in todo[number + 1 :] if replace(c, round=0) not in given_up]
            rest = f"; about {duration(time_left.of(coming))} left" if coming else ""
            print(f"[{number + 1}/{len(todo)}] {describe(cell, result)}{rest}", flush=True)
    redraw(folder)
    print()
    print((folder / "summary.txt").read_text())
    newest = {row["key"]: row for row in results.rows()}
    return int(any(newest.get(key, {}).get("status", OK) != OK for key in keys.values()))


def _all_rounds(rows: list[dict], cell: GridCell, key_of: Callable[[GridCell], str]) -> dict:
    """Merges every round of the cell's mode and length on these devices into one result."""
    own = []
    for row in rows:
        where = GridCell(row["mode"], row["seq_length"], row["rounds"][0]["round"])
        if replace(where, round=0) == replace(cell, round=0) and row["key"] == key_of(where):
            own.append(row)
    found = merge(own)
    del found["key"]
    return found


def describe(cell: GridCell, result: dict) -> str:
    if result["status"] != OK:
        return f"{cell.label}: {result['status']}: {result['reason']}"
    step = summarize(result["rounds"][-1]["step_ms"])
    peak = result["peak_memory_gb"]
    memory = "" if peak is None else f", {peak:.2f} GiB"
    return f"{cell.label}: {step.median:.1f} ms per step{memory}"


# ---- on all ranks --------------------------------------------------------------------------------


def from_first(run: Callable[[Start], int], hardware: Hardware) -> int:
    """Calls `run` in the first process, with what starts a cell's command on all ranks.

    torchrun's processes stay; each starts its own rank of every cell, as the first one says.
    """
    if not launched():
        print(hardware.sentence, flush=True)
        return run(lambda command: run_ranks(command, hardware.num_processes))
    rank, world_size = launched_rank(), launched_world_size()
    store = connect_store(A_DAY, host_it=rank == 0)
    if rank > 0:
        return follow(store)
    print(hardware.sentence, flush=True)
    started = 0

    def start(cell_command: list[str]) -> Outcome:
        nonlocal started
        started += 1
        store.set(f"cell_{started}", json.dumps(cell_command))
        return _run_with_others(store, started, cell_command, world_size)

    try:
        return run(start)
    finally:
        store.set(f"cell_{started + 1}", json.dumps(None))
        if world_size > 1:
            store.wait(["everyone_has_left"], timedelta(seconds=30))


def follow(store: torch.distributed.Store) -> int:
    """Starts this rank of each cell, on a process that is not the first, until none is left."""
    world_size, started = launched_world_size(), 0
    while True:
        started += 1
        store.wait([f"cell_{started}"])
        told = json.loads(store.get(f"cell_{started}"))
        if told is None:
            if store.add("left", 1) == world_size - 1:
                store.set("everyone_has_left", "")
            return 0  # the first process's status is that of all: torchrun stops it at another's
        _run_with_others(store, started, told, world_size)


def _run_with_others(
    store: torch.distributed.Store, number: int, cell_command: list[str], world_size: int
) -> Outcome:
    outcome = run_my_rank([sys.executable, *cell_command[1:]], number)
    if store.add(f"cell_{number}_left", 1) == world_size:
        store.set(f"cell_{number}_over", "")
    store.wait([f"cell_{number}_over"])
    return outcome
