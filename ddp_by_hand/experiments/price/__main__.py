#!/usr/bin/env python3
"""Measures a private step of a Llama against the same step without privacy.

Variants take turns in interleaved rounds; each is built, warmed up, timed and freed: drift of the
machine then affects all of them. Weights are random. Two times per step: forward, backward,
clipping and exchange alone, and the complete step with noise and fused AdamW. There are four kinds:

plain     a Llama for sequence classification on one GPU, in bfloat16, all of it trainable,
          `nn.RMSNorm` in place of the library's own; --compile is for all variants, also those
          without privacy
--noise   the same network, always private, with one noise and another; ratios are to the
          default one. `secure` is that of PrivacyEngine(secure_mode=True), `bands_8` that of
          CorrelatedNoise(bands=8). `alone` is the noise on float32 sums of all its parameters,
          which become bfloat16. A row of more samples than --part is a logical batch: its parts
          are summed, and noise is added once
--pairs   preference pairs: `ordinary` is a `trl.DPOTrainer`, other variants are a
          `PrivateDPOTrainer` in that mode. Both train adapters of all linear layers in bfloat16.
          Each step takes all pairs of the data, whose completions have T tokens with their prompt;
          the reference is the model without its adapters
--sharded FSDP2 on all GPUs, in one set of processes: the network of `experiments.llama_fsdp`,
          which measures each cell in processes of its own
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from ddp_by_hand.experiments.llama_fsdp.network import build, random_batch
from ddp_by_hand.experiments.networks.bounds import kernels_of
from ddp_by_hand.experiments.price.models import MODELS, compile_layers
from ddp_by_hand.experiments.price.options import ROWS, VARIANTS, Options
from ddp_by_hand.experiments.rounds import RoundCell, costs_of, device_for, run_program
from ddp_by_hand.experiments.training import ClassifierTraining
from ddp_by_hand.lm.launch import run_ranks
from ddp_by_hand.lm.ranks import watched_rank
from ddp_by_hand.lm.runtime import Worker, find_hardware, launched
from ddp_by_hand.lm.timing import time_steps
from ddp_by_hand.lm.watch import Watch
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.extras import require
from ddp_by_hand.measure.options import as_arguments, program

PROGRAM = "ddp_by_hand.experiments.price"
EXAMPLES = """\
examples:
  python -m ddp_by_hand.experiments.price
      the 1B shape on one GPU: all rows, five variants, three rounds
  python -m ddp_by_hand.experiments.price --model llama-3.1-8b-block --compile
  python -m ddp_by_hand.experiments.price --rows 4x1024 4x2048 4x4096
      growth with the length
  python -m ddp_by_hand.experiments.price --noise default bands_2 bands_4 bands_8 --steps 2
  python -m ddp_by_hand.experiments.price --pairs --rows 8x1024 --variants ordinary bookkeeping
  python -m ddp_by_hand.experiments.price --sharded
      the 8B shape on all GPUs, two samples per GPU of 1024, 2048 and 4096 tokens
  python -m ddp_by_hand.experiments.price --model tiny --rounds 1
      a rehearsal on a CPU; with --sharded on two CPU processes
"""


@program(PROGRAM, Options, epilog=EXAMPLES, needs=["transformers"])
def main(options: Options) -> int:
    """Measures all cells. Returns 1 if one, or a rank, failed."""
    options = filled(options)
    device = device_for(options.model)
    if not options.sharded:
        return priced(options, device)
    with bad_input():
        hardware = find_hardware("auto", options.num_processes)
    if launched():
        with watched_rank(hardware, options.timeout) as (worker, watch):
            return priced(options, worker.device, worker, watch)
    print(hardware.sentence, flush=True)
    command = [sys.executable, "-m", PROGRAM, *as_arguments(options)]
    return int(run_ranks(command, hardware.num_processes).status != 0)


def filled(options: Options) -> Options:
    """Returns the options with the defaults of the model and of the kind of step."""
    name = options.model or ("llama-3.1-8b" if options.sharded else "llama-3.2-1b")
    rows = MODELS[name].rows if name == "tiny" else ROWS.get(options.kind, MODELS[name].rows)
    return replace(
        options, model=name, layers=options.layers or MODELS[name].layers,
        rows=options.rows or rows,
        variants=options.variants or VARIANTS.get(options.kind),
    )  # fmt: skip


def priced(
    options: Options, device: torch.device, worker: Worker | None = None, watch: Watch | None = None
) -> int:
    """Measures all cells, as one of several ranks if there is a `worker`."""
    config = {"model": options.model, "layers": options.layers, "compiled": options.compile}
    rows, variants, notes = options.rows, options.variants, ()
    measure = partial(measured, options=options, device=device, worker=worker, watch=watch)
    if worker is not None:
        config["ranks"] = worker.world_size
    elif options.noise:
        from ddp_by_hand.experiments.price.noise import ALONE, LEGEND, NoisySteps

        steps = NoisySteps(options, device)
        print(f"{options.model}: {steps.numel:,} parameters", flush=True)
        config["part"] = options.part
        rows, variants, notes = (ALONE, *rows), options.noise, ("", *LEGEND)
        measure = steps.measure
    elif options.pairs:
        require("peft", "trl")
        from ddp_by_hand.experiments.price import pairs

        pairs.quieten()
        config |= {"rank": options.rank, "checkpointing": options.checkpointing}
        measure = partial(pairs.measure, options=options, device=device)
    speaks = worker is None or worker.is_first
    return run_program(options, rows, variants, measure, config, device, notes, speaks=speaks)


def measured(
    cell: RoundCell, options: Options, device: torch.device, worker: Worker | None,
    watch: Watch | None,
) -> dict:  # fmt: skip
    """Measures a step on one GPU, or under FSDP2 by all ranks."""
    model, seed, note = MODELS[options.model], 1, lambda where: None
    expected = {}
    if worker is None:
        torch.manual_seed(0)
        network = model.build(options.layers, device)
    else:
        note, seed = watch.at, 1 + worker.rank
        note(str(cell))
        config = model.shape.config(options.layers)
        network = build(None, config, device, 0, train_embedding=False)
        expected["expected_batch_size"] = cell.row.samples * worker.world_size
    training = ClassifierTraining(network, device)
    training.make_variant(cell.variant, cell.row.samples, **expected)
    if options.compile:
        compile_layers(network)
    generator = torch.Generator(device).manual_seed(seed)
    batch = random_batch(cell.row, model.shape.vocabulary, generator)
    batches = [batch] * (options.warm_up + options.steps)
    found = costs_of(time_steps(training, batches, options.warm_up, device, note))
    if options.profile:
        print(f"{cell.variant} {cell.row}: kernels by time")
        print("\n".join(slowest(kernels_of(training, batch))))
    return found


def slowest(kernels: Mapping[str, tuple[float, float]], count: int = 30) -> list[str]:
    """Lists the kernels of one step by total time: milliseconds, calls, name."""
    rows = sorted(kernels.items(), key=lambda row: -row[1][0])[:count]
    total = sum(ms for ms, _ in kernels.values())
    lines = [f"{ms:8.2f} {calls:5.0f}  {name[:90]}" for name, (ms, calls) in rows]
    return [f"{total:8.2f} ms in all", *lines]


if __name__ == "__main__":
    sys.exit(main())
