"""Check, time and profile data-parallel implementations beside PyTorch's own."""

import faulthandler
import gc
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ddp_by_hand.bench.memory import describe_memory
from ddp_by_hand.bench.options import EXAMPLES, PROGRAM, Options
from ddp_by_hand.bench.profiling import ENDED, Profiling, leave_out_failed
from ddp_by_hand.bench.report import describe_privacy, report
from ddp_by_hand.bench.settings import Settings, check_world, settings_from
from ddp_by_hand.bench.sharded import layout_of
from ddp_by_hand.bench.worker import Benchmark, failure_row, plan, record_failure
from ddp_by_hand.lm.interrupt import INTERRUPTED
from ddp_by_hand.lm.launch import run_ranks
from ddp_by_hand.lm.model import Transformer
from ddp_by_hand.lm.ranks import watched_rank
from ddp_by_hand.lm.runtime import (
    Hardware,
    device_name,
    find_hardware,
    has_parent,
    invocation,
    launched,
    launched_rank,
    typed_command,
)
from ddp_by_hand.lm.watch import Cause
from ddp_by_hand.measure import Results
from ddp_by_hand.measure.command_line import bad_input, check_folder
from ddp_by_hand.measure.files import say_unwritten
from ddp_by_hand.measure.options import program
from ddp_by_hand.measure.report import write_report
from ddp_by_hand.measure.words import counted

DEFAULT_FOLDER = Path("results_ddp")


@program(PROGRAM, Options, epilog=EXAMPLES, needs=("matplotlib", "jinja2"))
def main(options: Options) -> int:
    """Starts the workers, and reports their results. Returns 1 for what is wrong or failed."""
    with bad_input():
        hardware = find_hardware(options.device, options.num_processes)
        folder = DEFAULT_FOLDER / invocation()[: len("YYYYMMDD_HHMMSS")]
        settings = settings_from(options, hardware.device_type, folder)
        check_world(settings, hardware.world_size)
        check_output(settings, options)
    if options.dry_run:
        if launched_rank() == 0:
            print(describe_plan(settings, hardware, options))
        return 0
    if launched():
        return work(settings, hardware, options)
    try:
        return launch(settings, hardware, options)
    except KeyboardInterrupt:
        folder = options.profile_output_dir if options.profile else settings.output_dir
        message = f"interrupted: what is finished is in {folder}"
        if not options.profile:
            more = [] if options.output_dir else ["--output-dir", str(folder)]
            again = typed_command(PROGRAM, [*sys.argv[1:], *more])
            message += f"; resume with: {shlex.join(again)}"
        print(message, file=sys.stderr)
        return INTERRUPTED


def check_output(settings: Settings, options: Options) -> None:
    """Refuse a folder that cannot take the results; make it, unless this is a rehearsal."""
    if options.profile:
        check_folder("--profile-output-dir", options.profile_output_dir, not options.dry_run)
    elif launched_rank() == 0:
        check_folder("--output-dir", settings.output_dir, not options.dry_run)
        try:
            Results(settings.output_dir)  # refuses the rows of another version
        except (ValueError, OSError) as error:
            raise ValueError(f"--output-dir: {error}") from error


def launch(settings: Settings, hardware: Hardware, options: Options) -> int:
    """Start the ranks; when a cell ends them, record it and start again for the rest."""
    print(hardware.sentence, flush=True)
    command = [sys.executable, *sys.orig_argv[1:]]
    if options.profile:
        return launch_profile(command, hardware.num_processes)
    unwritten: list[dict] = []  # rows that results.jsonl did not take
    while True:
        outcome = run_ranks(command, hardware.num_processes)
        unwritten += json.loads(outcome.handed_over or "[]")
        if outcome.status == 0 or not (outcome.cause and outcome.doing):
            break
        failed = failure_row(outcome.doing, outcome.cause)
        try:
            record_failure(settings, failed)
        except OSError as error:  # another start would fail in the same cell
            say_unwritten(Results(settings.output_dir).path, error, "the rest is not measured")
            unwritten.append(failed)
            break
    if outcome.status and not outcome.cause:
        return 1
    status = print_report(settings, hardware.num_processes, hardware.device_name, unwritten)
    return max(status, int(outcome.status != 0))


def launch_profile(command: Sequence[str], num_processes: int) -> int:
    """Start the ranks; when an implementation ends them, start again for the others."""
    while True:
        outcome = run_ranks(command, num_processes)
        if outcome.status == 0 or not (outcome.cause and outcome.doing):
            return int(outcome.status != 0 or ENDED in os.environ)
        leave_out_failed(outcome)


def work(settings: Settings, hardware: Hardware, options: Options) -> int:
    """Runs one rank. Returns its exit status."""
    faulthandler.enable()  # a crash below Python shows where in Python it was
    torch._dynamo.reset()  # imports it, as the first optimizer would
    gc.freeze()  # imported objects stay alive: garbage collections skip them
    task: Benchmark | Profiling | None = None

    def on_failure(cause: Cause) -> None:
        if task is not None:
            task.on_failure(cause)

    own = settings.plugin_files
    with watched_rank(hardware, settings.timeout_s, on_failure, own=own) as (worker, watch):
        if options.profile:
            if options.enable_profiling:
                os.environ["DP_CLIPPING_PROFILE"] = "1"  # read when a model is made private
            task = Profiling(settings, worker, options.profile_output_dir)
        else:
            task = Benchmark(settings, worker)
        task.watch = watch
        task.run()
    if worker.is_first and isinstance(task, Benchmark) and not has_parent():
        device = device_name(worker.device)
        return print_report(settings, worker.world_size, device, task.unwritten)
    return int(isinstance(task, Profiling) and task.is_incomplete)


def print_report(
    settings: Settings, world_size: int, device: str, unwritten: Sequence[dict] = ()
) -> int:
    """Print the table, then write picture and page; the exit status.

    `unwritten`: rows that the results' file did not take.
    """
    _, status = report(settings, world_size, device, unwritten)
    try:
        print(f"report: {write_report(settings.output_dir)}", flush=True)
    except OSError as error:
        say_unwritten(error.filename or settings.output_dir, error)
        return 1
    except ValueError as error:  # of results that could not be written: see `unwritten`
        print(f"no report: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return status


def describe_plan(settings: Settings, hardware: Hardware, options: Options) -> str:
    """Describes what would run, for `--dry-run`."""
    world_size = hardware.world_size
    with torch.device("meta"):
        count = sum(p.numel() for p in Transformer(settings.model).parameters())
    width = 2 if settings.dtype == "bfloat16" else 4
    cells = plan(settings)
    lines = [
        hardware.sentence,
        f"model: {count:,} parameters, {count * width / (1 << 20):,.1f} MiB of gradients per step",
        f"batch: {settings.batch_size} sequences of {settings.model.context_length} tokens per "
        f"rank, {counted(world_size, 'rank')}, {settings.dtype}, data {settings.data}",
        f"implementations: {', '.join(settings.implementations)}",
    ]
    lines += [
        f"{name}: {layout_of(name).describe(world_size)}"
        for name in settings.implementations
        if layout_of(name).splits_tensors
    ]
    if settings.has_private:
        lines.append(
            f"clipping: {', '.join(settings.clippings)}; {describe_privacy(settings)}; batches of "
            "fixed size, no ε is stated"
        )
    if options.profile:
        return "\n".join([*lines, f"profile: {settings.num_steps} steps each, traces in "
                          f"{options.profile_output_dir}"])  # fmt: skip
    lines.append(
        f"benchmark: {len(cells)} cells, {settings.rounds} rounds of {settings.num_steps} steps "
        f"({settings.warmup_steps} of them warmup, not timed), results in {settings.output_dir}"
    )
    if not settings.has_private:  # whose steps keep more
        lines += describe_memory(settings, world_size, hardware.device_type, hardware.num_processes)
    return "\n".join(lines)
