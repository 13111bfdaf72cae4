#!/usr/bin/env python3
"""What private training of a Llama under FSDP2 costs, mode by mode and length by length.

Each cell, a mode at a sequence length, is measured in processes of its own; one that runs out of
memory or fails is a row like the others. The same command with the same --output-dir goes on where
it was stopped; `--help` says what the results folder receives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from experiments.llama_fsdp_options import (
    PROGRAM,
    cell_arguments,
    folder_of,
    output_of,
    parse,
    settings_of,
)
from experiments.llama_fsdp_results import (
    GIB,
    Cell,
    Settings,
    differs,
    merge,
    read_results,
    single_result,
    summarize_run,
)
from experiments.llama_network import SHAPES, config_of, files_of, on_meta, without_token
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
from measure import OK, Progress, Results, duration, plan_rounds, summarize, write_atomically
from measure.command_line import check_folder, refuse
from measure.report import say_report

VERSION = torch.__version__
A_DAY = timedelta(days=1)
Start = Callable[[list[str]], Outcome]


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", PROGRAM, *arguments]


# ---- main ----------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a cell failed, 2 for bad input."""
    options = parse(arguments)
    try:
        if options.redraw:
            return redraw(options.redraw) if launched_rank() == 0 else 0
        hardware = find_hardware(options.device, options.num_processes)
        if options.mode and launched():  # a rank of a cell: its launcher has checked the rest
            from experiments.llama_fsdp_cell import work

            cell = Cell(options.mode, options.seq_length, options.round)
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
        if launched():
            return run_under_torchrun(
                lambda start: run_grid(options, hardware, world_size, start), hardware
            )
        print(hardware.sentence, flush=True)
        start = lambda command: run_ranks(command, hardware.num_processes)  # noqa: E731
        if options.mode:
            return run_one(options, hardware, start)
        return run_grid(options, hardware, world_size, start)
    except KeyboardInterrupt:
        folder = options.output or folder_of(options)
        print(f"interrupted: what is finished is in {folder}; the same command with "
              f"--output-dir {folder_of(options)} resumes", file=sys.stderr)  # fmt: skip
        return INTERRUPTED


def check(options: argparse.Namespace, world_size: int) -> None:
    """What can be known before a worker starts.

    Raises:
        ValueError: the model cannot be had, or the folder cannot take results.
    """
    config_of(options.model_name)
    folder = options.output.parent if options.output else folder_of(options)
    check_folder("--output" if options.output else "--output-dir", folder, create=False)
    if options.output:
        return
    for row in Results(folder).rows():  # refuses those of another version
        if what := differs(settings_of(options), world_size, row):
            raise ValueError(f"--output-dir {folder} holds results of {what}; name another folder")


def redraw(folder: Path) -> int:
    """Pictures, summary and report, from the results that are there."""
    from experiments.llama_fsdp_plots import draw

    results = read_results(folder)
    write_atomically(folder / "summary.txt", summarize_run(results))
    paths = draw(results, folder / "visualizations")
    print(f"{folder}: summary.txt, {', '.join(path.name for path in paths)}")
    print(say_report(folder))
    return 0


def describe_plan(options: argparse.Namespace, hardware: Hardware, world_size: int) -> str:
    """What would run, for `--dry-run`."""
    network = on_meta(config_of(options.model_name), options.train_embedding)
    count = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    state = (4 * count + 12 * trained) / world_size / GIB  # weights; gradients and AdamW's two
    cells = plan(options)
    return "\n".join([
        hardware.sentence,
        f"model: {options.model_name}, {count:,} parameters, {trained:,} of them trained; weights, "
        f"gradients and AdamW in float32 take {state:,.2f} GiB on each of {world_size} ranks, "
        "activations not counted",
        f"batch: {options.batch_size} samples a rank, {options.batch_size * world_size} in all; "
        f"{options.warmup_iter} + {options.num_iter} steps a cell; clipping {options.clipping}",
        f"{len(cells)} cells, each in {world_size} processes of its own:",
        *(f"  {cell.label}" for cell in cells),
        f"results: {folder_of(options)}",
    ])  # fmt: skip


def plan(options: argparse.Namespace) -> list[Cell]:
    """Lengths from short to long; the modes of one take turns in interleaved rounds."""
    if options.mode:
        return [Cell(options.mode, options.seq_length, options.round)]
    return [
        Cell(mode, length, number)
        for length in sorted(options.seq_lengths)
        for number, mode in plan_rounds(options.modes, options.rounds, seed=0)
    ]


# ---- one cell and the grid -----------------------------------------------------------------------


def run_one(options: argparse.Namespace, hardware: Hardware, start: Start) -> int:
    (cell,) = plan(options)
    output = output_of(options, cell)
    result = measure(cell, options, hardware, hardware.num_processes, start, output)
    print(f"{describe(cell, result)}; {output}")
    return int(result["status"] != OK)


def measure(
    cell: Cell,
    options: argparse.Namespace,
    hardware: Hardware,
    world_size: int,
    start: Start,
    output: Path,
) -> dict:
    """Run the cell in processes of its own; its result, that of a failure too, is in `output`."""
    words = command(cell_arguments(cell, options, output))
    return run_cell(words, cell, settings_of(options), hardware, world_size, start, output)


def run_cell(
    words: list[str],
    cell: Cell,
    settings: Settings,
    hardware: Hardware,
    world_size: int,
    start: Start,
    output: Path,
) -> dict:
    """The result that the command `words` leaves in `output`, or that of its failure."""
    from experiments.llama_fsdp_cell import write_result

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


def run_grid(options: argparse.Namespace, hardware: Hardware, world_size: int, start: Start) -> int:
    """Every cell that is not finished, then pictures and summary; 1 if a cell has failed."""
    from experiments.llama_fsdp_cell import write_result

    folder, settings = folder_of(options), settings_of(options)
    options.output_dir = folder
    device = "cpu" if hardware.device_type == "cpu" else torch.cuda.get_device_name(0)
    results, key_of = Results(folder), lambda c: c.key(settings, world_size, device, VERSION)
    keys = {cell: key_of(cell) for cell in plan(options)}
    todo = [cell for cell, key in keys.items() if not results.finished(key)]
    if len(todo) < len(keys):
        print(f"{len(keys) - len(todo)} of {len(keys)} cells are finished in {folder}")
    temporary = folder / ".cell.json"
    began, given_up = time.monotonic(), set()
    with Progress(len(todo)) as progress:
        for number, cell in enumerate(todo):
            progress.update(cell.label)
            place = replace(cell, round=0)
            if place in given_up:  # what failed in this call would fail again
                continue
            result = measure(cell, options, hardware, world_size, start, temporary)
            temporary.unlink()
            results.record({"key": keys[cell], **result, "command": options.typed})
            if result["status"] != OK:
                given_up.add(place)
            write_result(folder / cell.file, _all_rounds(results.rows(), cell, key_of))
            progress.close()
            left = (time.monotonic() - began) / (number + 1) * (len(todo) - number - 1)
            rest = f"; about {duration(left)} left" if left else ""
            print(f"[{number + 1}/{len(todo)}] {describe(cell, result)}{rest}", flush=True)
    redraw(folder)
    print()
    print((folder / "summary.txt").read_text())
    newest = {row["key"]: row for row in results.rows()}
    return int(any(newest.get(key, {}).get("status", OK) != OK for key in keys.values()))


def _all_rounds(rows: list[dict], cell: Cell, key_of: Callable[[Cell], str]) -> dict:
    """Every round of the cell's mode and length on these devices, as one result."""
    own = []
    for row in rows:
        where = Cell(row["mode"], row["seq_length"], row["rounds"][0]["round"])
        if replace(where, round=0) == replace(cell, round=0) and row["key"] == key_of(where):
            own.append(row)
    found = merge(own)
    del found["key"]
    return found


def describe(cell: Cell, result: dict) -> str:
    if result["status"] != OK:
        return f"{cell.label}: {result['status']}: {result['reason']}"
    step = summarize(result["rounds"][-1]["step_ms"])
    peak = result["peak_memory_gb"]
    memory = "" if peak is None else f", {peak:.2f} GiB"
    return f"{cell.label}: {step.median:.1f} ms a step{memory}"


# ---- under torchrun ------------------------------------------------------------------------------


def run_under_torchrun(run: Callable[[Start], int], hardware: Hardware) -> int:
    """torchrun's processes stay; each starts its own rank of every cell, as the first one says.

    `run` is called there alone, with what starts a cell's command on all ranks.
    """
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
    """Another process than the first: start this rank of each cell until there is none left."""
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


if __name__ == "__main__":
    sys.exit(main())
