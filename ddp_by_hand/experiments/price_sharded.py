#!/usr/bin/env python3
"""Measures a private step of a Llama under FSDP2, against the same step without privacy.

Variants take turns in interleaved rounds in one set of processes, each built, warmed up, timed and
freed: drift of the machine then affects all of them. The shape of the network, its weights and
batches are those of `experiments.llama_fsdp`, which measures each cell in processes of its own.
Ratios are of complete steps, with noise and fused AdamW; medians over rounds with their interval.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ddp_by_hand.experiments.llama_fsdp.network import SHAPES
from ddp_by_hand.experiments.llama_fsdp.plan import say_reference_modes
from ddp_by_hand.experiments.llama_fsdp.results import MODES as GRID
from ddp_by_hand.experiments.llama_fsdp.results import GridCell, GridSettings
from ddp_by_hand.experiments.rounds import (
    BASELINE,
    FUSED_STEP,
    PER_LAYER,
    RoundCell,
    RoundOptions,
    Row,
    costs_of,
    interleave,
    report,
    row_of,
    run_rounds,
)
from ddp_by_hand.lm.interrupt import INTERRUPTED
from ddp_by_hand.lm.launch import run_ranks
from ddp_by_hand.lm.ranks import watched_rank
from ddp_by_hand.lm.runtime import Hardware, Worker, find_hardware, launched
from ddp_by_hand.lm.timing import time_steps
from ddp_by_hand.lm.watch import Watch
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import as_arguments, not_negative, option, positive, program
from dp_clipping.modes import MODES

PROGRAM = "ddp_by_hand.experiments.price_sharded"
OF_GRID = {mode: name for name, mode in GRID.items()}  # modes that `llama_fsdp` measures
CHOICES = (BASELINE, *(m for m in MODES if m in OF_GRID and m != "no_dp"))
CHOICES += tuple(mode + PER_LAYER for mode in CHOICES[1:])
CHOICES += tuple("flash_bookkeeping" + layers + FUSED_STEP for layers in ("", PER_LAYER))
DEFAULT = (BASELINE, "flash_bookkeeping", "flash_bookkeeping" + PER_LAYER, "flash")
ROWS, TINY = (Row(2, 1024), Row(2, 2048), Row(2, 4096)), Row(2, 32)
EXAMPLES = """\
examples:
  python -m ddp_by_hand.experiments.price_sharded
      the 8B shape on all GPUs, two samples per GPU of 1024, 2048 and 4096 tokens
  python -m ddp_by_hand.experiments.price_sharded --model-name llama-3.2-1b --rows 4x1024 --rounds 5
  python -m ddp_by_hand.experiments.price_sharded --model-name tiny --rounds 1 --steps 2
      a rehearsal on two CPU processes
"""


# fmt: off
@dataclass(frozen=True)
class Options(RoundOptions):
    model_name: str = option("llama-3.1-8b", choices=tuple(SHAPES), metavar="NAME",
        help=f"shape of the network: {', '.join(SHAPES)}")
    rows: tuple[Row, ...] | None = option(None, unique=True, metavar="BxT", type=row_of,
        help=(
        f"samples per rank x tokens per sample (default: {' '.join(map(str, ROWS))}; of tiny "
        f"{TINY})"))
    variants: tuple[str, ...] = option(DEFAULT, choices=CHOICES, unique=True, metavar="VARIANT",
        help=(
        f"of {', '.join(CHOICES)}"))
    steps: int = option(6, "timed steps per round", check=positive)
    warm_up: int = option(3, "steps of a round before those", check=not_negative)
    num_processes: int | None = option(None, metavar="N", check=positive,
        help="ranks, unless torchrun says it (default: one per GPU, two on a CPU)")
    timeout: float = option(300.0, metavar="S", check=positive,
        help="seconds without progress after which the run ends")
# fmt: on


@program(PROGRAM, Options, epilog=EXAMPLES)
def main(options: Options) -> int:
    """Runs all cells. Returns 1 if a rank failed."""
    with bad_input():
        hardware = find_hardware("auto", options.num_processes)
    if launched():
        return work(options, hardware)
    print(hardware.sentence, flush=True)
    command = [sys.executable, "-m", PROGRAM, *as_arguments(options)]
    try:
        return int(run_ranks(command, hardware.num_processes).status != 0)
    except KeyboardInterrupt:
        kept = f"what is finished is in {options.output}" if options.output else "nothing is kept"
        print(f"interrupted: {kept}", file=sys.stderr)
        return INTERRUPTED


def work(options: Options, hardware: Hardware) -> int:
    """Runs one rank of all cells."""
    with watched_rank(hardware, options.timeout) as (worker, watch):
        modes = (OF_GRID[mode_of(variant)] for variant in options.variants)
        if worker.is_first and (references := say_reference_modes(modes, worker.device.type)):
            print(references.replace("_fsdp", ""), flush=True)
        results = run_all(options, worker, watch)
        if worker.is_first:
            print(report(results))
    return 0


def run_all(options: Options, worker: Worker, watch: Watch) -> list[dict]:
    """Measures all cells. An error on one rank ends all ranks, which could not go on without it."""
    config = {"model": options.model_name, "ranks": worker.world_size}
    rows = options.rows or ((TINY,) if options.model_name == "tiny" else ROWS)
    return run_rounds(
        interleave(rows, options.variants, options.rounds),
        lambda cell: measure(cell, options, worker, watch), lambda _: config, worker.device,
        options.output if worker.is_first else None, speaks=worker.is_first,
    )  # fmt: skip


def mode_of(variant: str) -> str:
    variant = variant.removesuffix(FUSED_STEP)
    return "no_dp" if variant == BASELINE else variant.removesuffix(PER_LAYER)


def measure(cell: RoundCell, options: Options, worker: Worker, watch: Watch) -> dict:
    from ddp_by_hand.experiments.llama_fsdp.cell import LlamaTraining, make_batches

    watch.at(str(cell))
    settings = GridSettings(
        model_name=options.model_name, batch_size=cell.row.samples, num_iter=options.steps,
        warmup_iter=options.warm_up, timeout=options.timeout,
        clipping="per_layer" if PER_LAYER in cell.variant else "flat",
    )  # fmt: skip
    mode, length = OF_GRID[mode_of(cell.variant)], cell.row.tokens
    training = LlamaTraining(
        GridCell(mode, length, cell.round), settings, worker,
        fused_step=cell.variant.endswith(FUSED_STEP),
    )  # fmt: skip
    batches = make_batches(length, training.config.vocab_size, settings, worker)
    return costs_of(time_steps(training, batches, options.warm_up, worker.device, watch.at))


if __name__ == "__main__":
    sys.exit(main())
