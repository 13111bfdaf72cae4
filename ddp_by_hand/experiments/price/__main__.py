#!/usr/bin/env python3
"""Measures a private step on one GPU, against the same step without privacy.

    python -m ddp_by_hand.experiments.price      all rows, all variants, three rounds
    python -m ddp_by_hand.experiments.price --rows 8x1024 --variants ordinary bookkeeping
    python -m ddp_by_hand.experiments.price --model llama-3.1-8b-block --compile
    python -m ddp_by_hand.experiments.price --rows 4x1024 4x2048 4x4096   growth with the length
    python -m ddp_by_hand.experiments.price --model tiny --rounds 1       a rehearsal on a CPU

The network has the shape of a Llama for sequence classification, the 1B one or some layers of the
8B one, with random weights in bfloat16, all of it trainable, `nn.RMSNorm` in place of the library's
own. Variants take turns in interleaved rounds; each is built, warmed up, timed and freed. Two
times per step: forward, backward and clipping alone, and the complete step with noise and fused
AdamW. With --compile every variant's decoder layers are compiled, also those without privacy.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ddp_by_hand.experiments.llama_fsdp.network import LABELS, PAD
from ddp_by_hand.experiments.networks.bounds import kernels_of
from ddp_by_hand.experiments.price.models import MODELS, compile_layers
from ddp_by_hand.experiments.rounds import (
    BASELINE,
    FUSED_STEP,
    PER_LAYER,
    RoundCell,
    RoundOptions,
    Row,
    costs_of,
    device_for,
    row_of,
    run_program,
)
from ddp_by_hand.experiments.training import Batch, ClassifierTraining
from ddp_by_hand.lm.timing import time_steps
from ddp_by_hand.measure.options import option, positive, program
from dp_clipping import MODES

VARIANTS = (BASELINE, "flash_bookkeeping", "flash", "bookkeeping", "opacus_ghost")
CHOICES = (BASELINE, *MODES, *(mode + PER_LAYER for mode in MODES[1:]), "opacus_ghost")
CHOICES += ("flash_bookkeeping" + FUSED_STEP,)
WARM_UP = 3  # steps of a round that are not timed


# fmt: off
@dataclass(frozen=True)
class Options(RoundOptions):
    model: str = option(next(iter(MODELS)), "shape of the network", choices=tuple(MODELS))
    rows: tuple[Row, ...] | None = option(None, metavar="BxT", type=row_of, help=(
        "batch x tokens (default: five of the model's, 8192 to 16384 tokens of the 1B, "
        "4096 to 8192 of the 8B shape)"))
    variants: tuple[str, ...] = option(VARIANTS, choices=CHOICES, metavar="VARIANT",
        help=f"of {', '.join(CHOICES)}")
    layers: int | None = option(None, "decoder layers (default: 16 of 1B, 4 of 8B)", check=positive)
    compile: bool = option(False, "compile each decoder layer, in all variants")
    profile: bool = option(False, "print the slowest kernels")
# fmt: on


def training_of(variant: str, samples: int, options: Options, device: torch.device):
    """Builds the variant, ready to step."""
    torch.manual_seed(0)
    network = MODELS[options.model].build(options.layers, device)
    training = ClassifierTraining(network, device)
    training.make_variant(variant, samples)
    if options.compile:
        compile_layers(network)
    return training


def batch_of(row: Row, vocabulary: int, device: torch.device) -> Batch:
    """Makes random tokens [B, T] and labels [B]."""
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(PAD + 1, vocabulary, row, generator=generator, device=device)
    return tokens, torch.randint(0, LABELS, row[:1], generator=generator, device=device)


def measure(cell: RoundCell, options: Options, device: torch.device) -> dict:
    batch = batch_of(cell.row, MODELS[options.model].shape.vocabulary, device)
    training = training_of(cell.variant, cell.row.samples, options, device)
    found = costs_of(time_steps(training, [batch] * (WARM_UP + options.steps), WARM_UP, device))
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


@program("ddp_by_hand.experiments.price", Options)
def main(options: Options) -> int:
    """Measures all cells. Returns 1 if one failed."""
    device, model = device_for(options.model), MODELS[options.model]
    options = replace(options, layers=options.layers or model.layers)
    config = {"model": options.model, "layers": options.layers, "compiled": options.compile}
    return run_program(
        options, options.rows or model.rows, options.variants,
        lambda cell: measure(cell, options, device), config, device,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
