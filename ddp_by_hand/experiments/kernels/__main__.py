#!/usr/bin/env python3
"""The kernels of private gradients on one GPU, against the library on the same operands.

    python -m ddp_by_hand.experiments.kernels             all shapes, a table
    python -m ddp_by_hand.experiments.kernels --rounds 20 --output k.json
    python -m ddp_by_hand.experiments.kernels --crossing crossing.png --output crossing.json
    python -m ddp_by_hand.experiments.kernels --redraw crossing.json crossing.png  without a GPU

A shape is B x T x d x p: samples, tokens, outputs and inputs of a linear layer. Operands are random
bfloat16 numbers; `bmm` and the weight gradient are the library's. Calls take turns in every round,
with operands that are not in the second-level cache. Times are milliseconds of the device. Gram
norms of eight layers share a launch, and the time is a layer's; `alone`: in a launch of its own.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_by_hand.experiments.kernels import crossing
from ddp_by_hand.experiments.kernels.one_layer import (
    OneLayer,
    Shape,
    judge_plan,
    medians,
    predicted_ms,
    sums_of_pieces,
)
from ddp_by_hand.experiments.rounds import Recorder
from ddp_by_hand.lm.timing import release_memory
from ddp_by_hand.measure import Column, format_table
from ddp_by_hand.measure.command_line import BadInput
from ddp_by_hand.measure.extras import require
from ddp_by_hand.measure.options import is_writable, option, program, requires
from dp_clipping.kernels.launch.tuning import interleaved
from dp_clipping.planning.cost_model import Rates, rates_of

LLAMA_1B = [(8192, 2048), (2048, 2048), (512, 2048)]
LLAMA_8B = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
SHAPES = [
    *(Shape(b, t, *layer) for b, t in ((16, 512), (8, 1024), (4, 2048)) for layer in LLAMA_1B),
    *(Shape(b, t, *layer) for b, t in ((4, 1024), (2, 2048), (1, 4096)) for layer in LLAMA_8B),
    Shape(4, 4096, 8192, 2048),
    Shape(2, 4096, 14336, 4096),
    Shape(2, 8192, 4096, 4096),
]
COPY_BYTES = 1 << 30
TARGETS = [  # heading of a column, its meaning, target
    (
        "norm % wgrad",
        "rate of the norm accumulated over tokens, of the wgrad's",
        ">= 92 %",
    ),
    ("/ bmm", "gradient and its norm in one pass, of a library bmm", "<= 1.05"),
    ("/ Grams", "norm from symmetric Gram tiles, of two library bmm Grams", "<= 0.55"),
    ("sum % copy", "bandwidth of the weighted sum, of a large copy's", ">= 85 %"),
]
COLUMNS = [
    Column("shape", "B x T x d x p"),
    Column("ordinary", "wgrad ms", ".3f"),
    Column("ordinary_rate", "TFLOP/s", ".0f"),
    Column("library_gradients", "bmm ms", ".3f"),
    Column("gradient", "gradient ms", ".3f"),
    Column("gradient_ratio", "/ bmm", ".3f"),
    Column("norm_percent", "norm % wgrad", ".1f"),
    Column("library_grams", "2 Grams ms", ".3f"),
    Column("gram", "gram ms", ".3f"),
    Column("gram_ratio", "/ Grams", ".3f"),
    Column("gram_alone", "alone ms", ".3f"),
    Column("product_ratio", "product / wgrad", ".3f"),
    Column("sum_percent", "sum % copy", ".1f"),
    Column("error", "norm error", ".0e"),
    Column("chosen", "plan"),
    Column("excess_percent", "% over best", ".1f", right=True),
]


# fmt: off
@dataclass(frozen=True)
class Options:
    rounds: int = option(10, check=requires(lambda n: n >= 1, "must be at least 1"),
        help="samples of each call; one lasts a millisecond or one call")
    output: Path | None = option(None, "JSON of all samples (default: none)", check=is_writable)
    crossing: Path | None = option(None, metavar="PNG", check=is_writable,
        help="in place of the table, a picture: which algorithm pays at which length")
    redraw: tuple[Path, Path] | None = option(None, metavar=("JSON", "PNG"),
        help="the same picture from the results of an earlier run, without measuring")
# fmt: on


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Returns the bytes per second that a copy on the device reads and writes."""
    source = torch.ones(COPY_BYTES, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    samples = interleaved({"copy": lambda number: target.copy_(source)}, device, rounds)
    return 2 * COPY_BYTES / medians(samples)["copy"] * 1e3


def measure(shape: Shape, device: torch.device, rounds: int, rates: Rates) -> dict:
    """Measures one cell of the results: times of the pieces, errors, and the plan's choice."""
    layer = OneLayer(shape, device)
    errors = layer.norm_errors()
    samples = layer.time_pieces(rounds)
    cell = {"shape": list(shape), "samples_ms": samples, "norm_errors": errors}
    cell["sum_bytes"] = layer.sum_bytes
    cell["algorithms_ms"] = sums_of_pieces(medians(samples))
    cell["predicted_ms"] = predicted_ms(shape, rates)
    cell["plan"] = judge_plan(shape, rates, cell["algorithms_ms"])
    return cell


def row_of(cell: dict, bandwidth: float) -> dict:
    """Returns the table's row of one cell."""
    shape, ms = Shape(*cell["shape"]), medians(cell["samples_ms"])
    return {
        "shape": str(shape),
        **ms,
        "ordinary_rate": shape.operations / ms["ordinary"] / 1e9,
        "gradient_ratio": ms["gradient"] / ms["library_gradients"],
        "norm_percent": 100 * ms["ordinary"] / ms["norm"],
        "gram_ratio": ms["gram"] / ms["library_grams"],
        "product_ratio": ms["weighted_product"] / ms["ordinary"],
        "sum_percent": 100 * cell["sum_bytes"] / ms["weighted_sum"] * 1e3 / bandwidth,
        "error": max(cell["norm_errors"].values()),
        "chosen": cell["plan"]["chosen"],
        "excess_percent": 100 * cell["plan"]["excess"],
    }


def report(results: dict) -> str:
    """Formats the table of all shapes, with the targets below it."""
    bandwidth = results["copy_bytes_per_second"]
    rows = [row_of(cell, bandwidth) for cell in results["cells"]]
    lines = [format_table(COLUMNS, rows), "", f"copy: {bandwidth / 1e12:.2f} TB/s"]
    lines += [f"target of {name} ({meaning}): {figure}" for name, meaning, figure in TARGETS]
    lines += [plan_line([cell["plan"] for cell in results["cells"]])]
    return "\n".join(lines)


def plan_line(judgements: list[dict]) -> str:
    excess = [100 * judgement["excess"] for judgement in judgements]
    exact = sum(judgement["chosen"] == judgement["best"] for judgement in judgements)
    return (
        f"the plan chose the fastest single algorithm for {exact} of {len(excess)} shapes, "
        f"and one that took at most {max(excess):.1f} % longer"
    )


def run_table(options: Options, device: torch.device) -> None:
    recorder = Recorder(
        options.output,
        rounds=options.rounds,
        copy_bytes_per_second=copy_bandwidth(device, options.rounds),
        targets=[list(target) for target in TARGETS],
    )
    run_shapes(SHAPES, measure, options, device, recorder)
    print(report(recorder.results))


def run_crossing(options: Options, device: torch.device) -> None:
    recorder = Recorder(options.output, rounds=options.rounds)
    run_shapes(crossing.shapes(), crossing.measure, options, device, recorder)
    print(crossing.report(recorder.results))
    print(plan_line([cell["plan"] for cell in recorder.cells]))
    crossing.draw(recorder.results, options.crossing)


def run_shapes(
    shapes: Sequence[Shape],
    measure: Callable[[Shape, torch.device, int, Rates], dict],
    options: Options,
    device: torch.device,
    recorder: Recorder,
) -> None:
    rates = rates_of(device)
    for shape in shapes:
        cell = measure(shape, device, options.rounds, rates)
        ms = medians(cell["samples_ms"])
        recorder.add(cell, f"{shape}: " + ", ".join(f"{k} {v:.3f}" for k, v in ms.items()))
        release_memory(device)


@program("ddp_by_hand.experiments.kernels", Options)
def main(options: Options) -> int:
    if options.redraw or options.crossing:
        require("matplotlib")
    if options.redraw:
        source, target = options.redraw
        crossing.draw(json.loads(source.read_text()), target)
        return 0
    if not torch.cuda.is_available():
        raise BadInput("needs a CUDA device")
    (run_crossing if options.crossing else run_table)(options, torch.device("cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
