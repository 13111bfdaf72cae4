"""What a private step costs under FSDP2 on all GPUs, against the same step without privacy."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dp_clipping.modes import MODES
from experiments.llama_fsdp.network import SHAPES
from experiments.llama_fsdp.plan import say_twins
from experiments.llama_fsdp.results import MODES as GRID
from experiments.llama_fsdp.results import Cell, Settings
from experiments.price.report import legend, report
from experiments.rounds import Row, row_of
from lm.launch import INTERRUPTED, run_ranks
from lm.runtime import (
    Hardware,
    Worker,
    connect_store,
    find_hardware,
    is_first_of_host,
    launched,
    process_group,
)
from lm.watch import Watch
from measure import environment, plan_rounds, summarize, write_atomically
from measure.command_line import check_folder, refuse
from measure.options import not_negative, option, parse_options, positive

PROGRAM = "experiments.price_sharded"
ORDINARY, PER_LAYER = "ordinary", "_per_layer"  # behind a mode's name: clipping="per_layer"
OF_GRID = {mode: name for name, mode in GRID.items()}  # modes that `llama_fsdp` measures
CHOICES = (ORDINARY, *(m for m in MODES if m in OF_GRID and m != "no_dp"))
CHOICES += tuple(mode + PER_LAYER for mode in CHOICES[1:])
DEFAULT = (ORDINARY, "flash_bookkeeping", "flash_bookkeeping" + PER_LAYER, "flash")
ROWS, TINY = ("2x1024", "2x2048", "2x4096"), "2x32"
DESCRIPTION = """\
What a private step of a Llama costs under FSDP2, against the same step without privacy.

Variants take turns in interleaved rounds in one set of processes, each built, warmed up, timed and
freed: what drifts on the machine then meets all of them. The shape of the network, its weights and
batches are those of experiments.llama_fsdp, which measures each cell in processes of its own.
Ratios are of complete steps, with noise and fused AdamW; medians over rounds with their interval.
"""
EXAMPLES = """\
examples:
  python -m experiments.price_sharded
      the 8B shape on all GPUs, two samples a GPU of 1024, 2048 and 4096 tokens
  python -m experiments.price_sharded --model-name llama-3.2-1b --rows 4x1024 --rounds 5
  python -m experiments.price_sharded --model-name tiny --rounds 1 --steps 2
      a rehearsal on two CPU processes
"""


# fmt: off
@dataclass(frozen=True)
class Options:
    model_name: str = option("llama-3.1-8b", choices=tuple(SHAPES), metavar="NAME",
        help=f"shape of the network: {', '.join(SHAPES)}")
    rows: tuple[Row, ...] | None = option(None, unique=True, metavar="BxT", type=row_of,
        help=f"samples a rank x tokens a sample (default: {' '.join(ROWS)}; of tiny {TINY})")
    variants: tuple[str, ...] = option(DEFAULT, choices=CHOICES, unique=True, metavar="VARIANT",
        help=(
        f"of {', '.join(CHOICES)}"))
    rounds: int = option(3, "times each is built", check=positive)
    steps: int = option(6, "timed steps a round", check=positive)
    warm_up: int = option(3, "steps of a round before those", check=not_negative)
    output: Path | None = option(None, "JSON of all samples (default: none)")
    num_processes: int | None = option(None, metavar="N", check=positive,
        help="ranks, unless torchrun says it (default: one a GPU, two on a CPU)")
    timeout: float = option(300.0, metavar="S", check=positive,
        help="seconds without progress after which the run ends")
# fmt: on

    def __post_init__(self) -> None:
        if self.output:
            check_folder("--output", self.output.absolute().parent, create=False)


def parse(arguments: Sequence[str] | None) -> Options:
    options = parse_options(
        Options, arguments, prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES,
        speaks=is_first_of_host,
    )  # fmt: skip
    default = (TINY,) if options.model_name == "tiny" else ROWS
    return replace(options, rows=options.rows or tuple(map(row_of, default)))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a rank failed, 2 for bad input, 130 after Ctrl-C."""
    options = parse(arguments)
    try:
        hardware = find_hardware("auto", options.num_processes)
    except ValueError as error:
        return refuse(PROGRAM, error, is_first_of_host())
    if launched():
        return work(options, hardware)
    print(hardware.sentence, flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    outcome = run_ranks([sys.executable, "-m", PROGRAM, *given], hardware.num_processes)
    if outcome.status == INTERRUPTED:
        kept = f"what is finished is in {options.output}" if options.output else "nothing is kept"
        print(f"interrupted: {kept}", file=sys.stderr)
        return INTERRUPTED
    return int(outcome.status != 0)


def work(options: Options, hardware: Hardware) -> int:
    """One rank of all cells."""
    with process_group(hardware, options.timeout) as worker:
        store = connect_store(timedelta(seconds=options.timeout))
        watch = Watch(store, worker.rank, worker.world_size, options.timeout, lambda cause: None)
        try:
            results: list[dict] = []
            modes = (OF_GRID[mode_of(variant)] for variant in options.variants)
            if worker.is_first and (twins := say_twins(modes, worker.device.type)):
                print(twins.replace("_fsdp", ""), flush=True)
            for row in options.rows:
                for number, variant in plan_rounds(options.variants, options.rounds, 0):
                    results.append(measure(row, variant, number, options, worker, watch))
                    if worker.is_first:
                        tell(results, options.output)
            if worker.is_first:
                print(report(results), legend(results), sep="\n\n")
            dist.barrier()
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)  # the others may be gone: an orderly end is not possible
        except Exception as error:
            watch.fail(error)
        watch.close()
        dist.barrier()
    return 0


def mode_of(variant: str) -> str:
    return "no_dp" if variant == ORDINARY else variant.removesuffix(PER_LAYER)


def measure(
    row: Row, variant: str, number: int, options: Options, worker: Worker, watch: Watch
) -> dict:
    """Milliseconds of each step on the slowest rank, peak memory in MiB of the largest."""
    from experiments.llama_fsdp.cell import Run, make_batches, time_steps

    watch.at(f"{variant} {row}, round {number + 1}")
    is_per_layer = variant.endswith(PER_LAYER)
    settings = Settings(
        model_name=options.model_name, batch_size=row.samples, num_iter=options.steps,
        warmup_iter=options.warm_up, learning_rate=1e-5, sigma=1.0, max_grad_norm=1.0,
        clipping="per_layer" if is_per_layer else "flat", train_embedding=False, seed=0,
        timeout_s=options.timeout,
    )  # fmt: skip
    cell = replace(Cell(OF_GRID[mode_of(variant)], row.tokens), round=number)
    run = Run(cell, settings, worker)
    batches = make_batches(row.tokens, run.config.vocab_size, settings, worker)
    steps, parts, peak = time_steps(run, batches, options.warm_up, worker, watch)
    del run, batches
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "row": str(row), "variant": variant, "round": number, "model": options.model_name,
        "ranks": worker.world_size, "step_ms": steps, "without_step_ms": parts,
        "peak_mib": (peak or 0) / 2**20,
    }  # fmt: skip


def tell(results: list[dict], output: Path | None) -> None:
    """One line of progress, and all that is known so far."""
    cell = results[-1]
    step = summarize(cell["step_ms"]).median
    print(
        f"{cell['row']} {cell['variant']} round {cell['round'] + 1}: {step:.1f} ms, "
        f"{cell['peak_mib']:,.0f} MiB", flush=True,
    )  # fmt: skip
    if output:
        content = {"environment": environment(), "cells": results}
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, json.dumps(content, indent=1))
