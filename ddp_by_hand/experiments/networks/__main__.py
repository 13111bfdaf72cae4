#!/usr/bin/env python3
"""Measures private steps of many kinds of network against the same steps without privacy.

    python -m ddp_by_hand.experiments.networks          all networks, four variants, three rounds
    python -m ddp_by_hand.experiments.networks --networks vit_b16 --variants ordinary bookkeeping
    python -m ddp_by_hand.experiments.networks --small  the same networks in small, on any device
    python -m ddp_by_hand.experiments.networks --cuda-graph --variants ordinary flash_bookkeeping
                                                       steps as CUDA graphs, on both sides

Variants take turns in interleaved rounds; each is built, warmed up, timed and freed. Steps are
complete, with noise and AdamW, which is fused on a GPU. In the first round a variant takes a few
more steps, which say how long the host needs to issue a step, how long the kernels take and how
many there are. A variant that refuses a network, or fails on it, says why in its line, and is not
tried again. Without a GPU all networks are small, which shows that they run, and no more.

With --cuda-graph the complete step is one CUDA graph, the ordinary one too: forward, loss, backward
and AdamW. Inputs are copied from pinned memory. The peak of memory is that of the capture.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ddp_by_hand.experiments.networks.bounds import LEGEND, bounds_of, describe_bounds
from ddp_by_hand.experiments.networks.graphs import GraphedTraining, in_pinned_memory
from ddp_by_hand.experiments.networks.rows import ROWS
from ddp_by_hand.experiments.networks.training import training_of
from ddp_by_hand.experiments.rounds import (
    BASELINE,
    RoundCell,
    RoundOptions,
    costs_of,
    interleave,
    report,
    run_rounds,
)
from ddp_by_hand.experiments.training import CHOICES, OPACUS_VARIANTS, OURS
from ddp_by_hand.lm.timing import time_steps
from ddp_by_hand.measure import OK
from ddp_by_hand.measure.options import option, program

PROGRAM = "ddp_by_hand.experiments.networks"
VARIANTS = (BASELINE, OURS, *OPACUS_VARIANTS)
WARM_UP = 8  # steps that are not timed: private ones check the network at 1, 2, 4 and 8
WARM_UP_SMALL = 1


# fmt: off
@dataclass(frozen=True)
class Options(RoundOptions):
    networks: tuple[str, ...] = option(tuple(ROWS), choices=tuple(ROWS), unique=True,
        aliases=("--rows",), metavar="NETWORK", help=f"of {', '.join(ROWS)} (default: all)")
    variants: tuple[str, ...] = option(VARIANTS, choices=CHOICES, unique=True, metavar="VARIANT",
        help=f"of {', '.join(CHOICES)}")
    small: bool = option(False, "small networks on small batches, as on a CPU (default: off)")
    compile: bool = option(False, "compile each network, in all variants (default: off)")
    cuda_graph: bool = option(False, "capture each step as a CUDA graph (default: off)")
# fmt: on

    def __post_init__(self) -> None:
        if self.cuda_graph and self.compile:
            raise ValueError(
                "--cuda-graph with --compile: a private step of compiled modules cannot be "
                "captured, so give one of the two"
            )
        if self.cuda_graph and not torch.cuda.is_available():
            raise ValueError(
                "--cuda-graph needs a GPU, and PyTorch finds none: without one, measure eager "
                f"steps with python -m {PROGRAM} --small"
            )


def measure(cell: RoundCell, options: Options, device: torch.device) -> dict:
    """Returns the costs of a cell."""
    is_small = options.small or device.type != "cuda"
    graphed = None
    training: Any
    training, batch = training_of(
        cell.variant, cell.row, is_small, device, options.compile, options.cuda_graph
    )
    if options.cuda_graph:
        training = graphed = GraphedTraining(training, len(batch[1]), device)
        batch = in_pinned_memory(batch)
    warm_up = WARM_UP_SMALL if is_small and graphed is None else WARM_UP
    batches = [batch] * (warm_up + options.steps)
    check = (lambda: None) if graphed is None else graphed.check
    found = costs_of(time_steps(training, batches, warm_up, device, warmed_up=check))
    if graphed is not None:
        found["peak_memory_mb"] = max(found["peak_memory_mb"], graphed.capture_peak_mb)
    return found | (bounds_of(training, batch, device) if cell.round == 0 else {})


def run_all(options: Options, device: torch.device) -> list[dict]:
    is_small = options.small or device.type != "cuda"

    def config(cell: RoundCell) -> dict:
        batch = "small" if is_small else cell.row.batch
        return {"batch": batch, "compiled": options.compile, "cuda_graph": options.cuda_graph}

    rows = [ROWS[name] for name in options.networks]
    return run_rounds(
        interleave(rows, options.variants, options.rounds),
        lambda cell: measure(cell, options, device), config, device, options.output,
    )  # fmt: skip


@program(PROGRAM, Options)
def main(options: Options) -> int:
    """Measures all networks. Returns 0, or 1 if a network failed without privacy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cells = run_all(options, device)
    print(report(cells, describe_bounds), "", LEGEND, sep="\n")
    return int(any(c["variant"] == BASELINE and c["status"] != OK for c in cells))


if __name__ == "__main__":
    sys.exit(main())
