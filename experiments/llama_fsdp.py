#!/usr/bin/env python3
"""What private training of a Llama under FSDP2 costs, mode by mode and length by length.

Each cell, a mode at a sequence length, is measured in processes of its own; one that runs out of
memory or fails is a row like the others. The same command with the same --output-dir goes on where
it was stopped. The results folder receives

    {mode}_seq{T}_result.json        times of every step, phases, memory, environment
    visualizations/*.png             memory, time, both against each other, ratios to no_dp
    summary.txt                      the table of all that
    results.jsonl                    what a rerun resumes from
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from experiments.llama_fsdp_results import (
    GIB,
    MODES,
    Cell,
    Settings,
    differs,
    merge,
    read_results,
    single_result,
    summarize_run,
)
from experiments.llama_network import SHAPES, TOKEN, config_of, files_of, on_meta, without_token
from lm.launch import INTERRUPTED, Outcome, run_my_rank, run_ranks
from lm.runtime import (
    Hardware,
    connect_store,
    find_hardware,
    invocation,
    is_first_of_host,
    launched,
    launched_rank,
    launched_world_size,
)
from measure import OK, Progress, Results, duration, plan_rounds, summarize, write_atomically

VERSION = torch.__version__
PROGRAM = "experiments.llama_fsdp"
BAD_INPUT = 2
LENGTHS = (1024, 2048, 4096)
A_DAY = timedelta(days=1)
Start = Callable[[list[str]], Outcome]
EXAMPLES = """\
examples:
  python -m experiments.llama_fsdp
      the 8B shape, all modes at 1024, 2048 and 4096 tokens, on all GPUs of this machine
  python -m experiments.llama_fsdp --model-name tiny --seq-lengths 32 64 --num-iter 3
      a rehearsal in a minute or two, on two CPU processes
  python -m experiments.llama_fsdp --rounds 5 --output-dir results/mine
      five interleaved rounds, whose spread says how far to trust a ratio; again: resumes
  python -m experiments.llama_fsdp --mode flash_fsdp --seq-length 2048 --output one.json
      one cell
  torchrun --nproc_per_node=8 -m experiments.llama_fsdp --modes no_dp flash_bookkeeping_fsdp
      the same under torchrun, also over several nodes
  python -m experiments.llama_fsdp --redraw results/mine
      pictures and summary from the results that are there
"""


# ---- the command line ----------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse, with a wrong option answered by one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n" if is_first_of_host() else None)


def parser() -> Parser:
    made = Parser(
        prog=PROGRAM, description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_grid(made.add_argument_group("what to measure"))
    _add_training(made.add_argument_group("training"))
    _add_run(made.add_argument_group("run and output"))
    return made


def _add_grid(group: argparse._ArgumentGroup) -> None:
    modes = ", ".join(MODES)
    group.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE",
        help=f"any of {modes} (default: all); ratios need no_dp",
    )  # fmt: skip
    group.add_argument(
        "--seq-lengths", nargs="+", type=int, default=list(LENGTHS), metavar="T",
        help=f"tokens a sample (default: {' '.join(map(str, LENGTHS))})",
    )  # fmt: skip
    group.add_argument(
        "--mode", choices=MODES, metavar="MODE", help="one cell: its mode; with --seq-length"
    )
    group.add_argument("--seq-length", type=int, metavar="T", help="one cell: tokens a sample")
    group.add_argument(
        "--model-name", default="llama-3.1-8b", metavar="NAME",
        help=f"a built-in shape with random weights ({', '.join(SHAPES)}), or a Hugging Face name "
        f"or folder with its weights; gated ones need {TOKEN} in the environment "
        "(default: llama-3.1-8b)",
    )  # fmt: skip
    group.add_argument(
        "--num-iter", type=int, default=10, metavar="N", help="timed steps a cell (default: 10)"
    )
    group.add_argument(
        "--warmup-iter", type=int, default=3, metavar="N",
        help="steps before them, which are not timed (default: 3)",
    )  # fmt: skip
    group.add_argument(
        "--rounds", type=int, default=1, metavar="N",
        help="times that the whole list of modes is measured, in turn (default: 1): what drifts "
        "meanwhile then cancels in ratios, and their intervals mean something",
    )  # fmt: skip


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size", type=int, default=1, metavar="B", help="samples a rank (default: 1)"
    )
    group.add_argument(
        "--clipping", choices=("flat", "per_layer"), default="flat",
        help="one norm over all parameters, or one threshold a module (default: flat)",
    )  # fmt: skip
    group.add_argument(
        "--sigma", type=float, default=1.0, metavar="S",
        help="noise multiplier: noise has S x --max-grad-norm as its deviation (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-grad-norm", type=float, default=1.0, metavar="C",
        help="clipping threshold of a sample's gradient (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--learning-rate", type=float, default=1e-5, metavar="LR", help="of AdamW (default: 1e-5)"
    )
    group.add_argument(
        "--train-embedding", action="store_true",
        help="train the token embedding too (default: frozen)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="of weights and batches, never of the noise (default: 0)",
    )  # fmt: skip


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-dir", type=Path, metavar="DIR",
        help="receives the results; an existing one resumes "
        "(default: a new results/run_YYYYMMDD_HHMMSS)",
    )  # fmt: skip
    group.add_argument(
        "--output", type=Path, metavar="FILE",
        help="one cell: its result (default: {mode}_seq{T}_result.json in --output-dir)",
    )  # fmt: skip
    group.add_argument(
        "--redraw", type=Path, metavar="DIR",
        help="only draw the pictures and write summary.txt, from the results in DIR",
    )  # fmt: skip
    group.add_argument(
        "--dry-run", action="store_true", help="say what would be measured; write nothing"
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: all GPUs with NCCL, else gloo on the CPU (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--num-processes", type=int, metavar="N",
        help="ranks, unless torchrun says it (default: one a GPU, two on a CPU)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds without progress after which a cell is given up, as a row (default: 600)",
    )  # fmt: skip
    group.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)  # of a grid's cell


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exit with status 2 and one line for what is wrong before anything is started."""
    made = parser()
    options = made.parse_args(arguments)
    if (options.mode is None) != (options.seq_length is None):
        made.error("--mode and --seq-length: one cell needs both")
    if options.output and options.mode is None:
        made.error("--output is for one cell: give --mode and --seq-length, or --output-dir")
    for name, value in vars(options).items():
        option = "--" + name.replace("_", "-")
        least = 0 if name in ("warmup_iter", "seed", "round") else 1
        for number in value if name == "seq_lengths" else [value]:
            if type(number) is int and number < least:
                made.error(f"{option} {number}: give {least} or more")
    for name in ("sigma", "max_grad_norm", "learning_rate", "timeout"):
        value = getattr(options, name)
        if not (0 <= value < float("inf")) or (value == 0 and name != "sigma"):
            least = "0 or more" if name == "sigma" else "a number above 0"
            made.error(f"--{name.replace('_', '-')} {value}: give {least}")
    options.modes = list(dict.fromkeys(options.modes))
    options.seq_lengths = list(dict.fromkeys(options.seq_lengths))
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    names = set(Settings.__dataclass_fields__) - {"timeout_s"}
    return Settings(**{n: getattr(options, n) for n in names}, timeout_s=options.timeout)


def cell_arguments(cell: Cell, options: argparse.Namespace, output: Path) -> list[str]:
    """The command line of one cell. No secrets: the token stays in the environment."""
    taken = (
        "model_name", "num_iter", "warmup_iter", "batch_size", "clipping", "sigma",
        "max_grad_norm", "learning_rate", "seed", "device", "timeout",
    )  # fmt: skip
    found = ["--mode", cell.mode, "--seq-length", str(cell.seq_length)]
    found += ["--round", str(cell.round), "--output", str(output)]
    for name in taken:
        found += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    return [*found, *(["--train-embedding"] if options.train_embedding else [])]


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
        if is_first_of_host():
            text = without_token(" ".join(str(error).split()))
            print(f"{PROGRAM}: {text}", file=sys.stderr)
        return BAD_INPUT
    if options.dry_run:
        if launched_rank() == 0:
            print(describe_plan(options, hardware, world_size))
        return 0
    try:
        if launched():
            return run_under_torchrun(options, hardware)
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
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ValueError(f"--output-dir {folder}: {existing} is a file, name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--output-dir {folder}: {existing} cannot be written to")
    if options.output:
        return
    for row in Results(folder).rows():  # refuses those of another version
        if what := differs(settings_of(options), world_size, row):
            raise ValueError(f"--output-dir {folder} holds results of {what}; name another folder")


def folder_of(options: argparse.Namespace) -> Path:
    stamp = invocation()[: len("YYYYMMDD_HHMMSS")]
    return options.output_dir or Path("results") / f"run_{stamp}"


def output_of(options: argparse.Namespace, cell: Cell) -> Path:
    return options.output or folder_of(options) / cell.file


def redraw(folder: Path) -> int:
    """Pictures and summary, from the results that are there."""
    from experiments.llama_fsdp_plots import draw

    results = read_results(folder)
    write_atomically(folder / "summary.txt", summarize_run(results))
    paths = draw(results, folder / "visualizations")
    print(f"{folder}: summary.txt, {', '.join(path.name for path in paths)}")
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
    from experiments.llama_fsdp_cell import write_result

    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    outcome = start(command(cell_arguments(cell, options, output)))
    if outcome.status == INTERRUPTED:
        raise KeyboardInterrupt
    if not output.exists():  # the rank that writes it was killed
        cause = outcome.cause
        reason = f"{cause.blame}{cause.message}" if cause else f"exit status {outcome.status}"
        result = single_result(
            cell, settings_of(options), hardware, world_size,
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
            results.record({"key": keys[cell], **result})
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


def run_under_torchrun(options: argparse.Namespace, hardware: Hardware) -> int:
    """torchrun's processes stay; each starts its own rank of every cell, as the first one says."""
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
        return run_grid(options, hardware, world_size, start)
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
