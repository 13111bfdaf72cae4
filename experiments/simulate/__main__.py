#!/usr/bin/env python3
"""Predicts the step time and memory of every variant on other numbers of GPUs, from traces.

    python benchmark_ddp.py --profile --profile-output-dir traces     what is read
    python -m experiments.simulate traces --gpus 64                   a table and simulation.png
    python -m experiments.simulate traces --gpus 64 --preset 1.2b --context-length 1024
    python -m experiments.simulate traces --validate results_ddp/*    how far off it was

The equations are in the docstrings, in the order of reading: `calibrate` (computation, contention),
`cost` (collectives), `plan` (what is sent when) and `step` (the simulation), `validate` (errors).
Memory is that of lm/memory.py. Not modelled: ranks that are slow by chance, links shared with other
jobs, and matrix products whose rate depends on their size.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.simulate.calibrate import Calibration, calibrate
from experiments.simulate.cost import Network
from experiments.simulate.step import Outcome, simulate
from experiments.simulate.validate import measured_steps, validation
from lm.memory import REPLICATED, SHARDED, predict_memory
from lm.model import PRESETS
from lm.shape import Shape
from measure import Column, format_table
from measure.command_line import check_file, ending_quietly, is_alone, refuse
from measure.curves import draw_efficiency
from measure.options import option, parse_options, positive

PROGRAM = "experiments.simulate"
COUNTS = tuple(2**i for i in range(11))  # GPUs in the picture
SIZES = ("d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length")
GIB = 1 << 30


def _size(what: str):
    return option(None, f"{what} (default: the traces')", metavar="N", check=positive)


# fmt: off
@dataclass(frozen=True)
class Options:
    traces: Path = option(help="folder that benchmark_ddp.py --profile wrote, with none and ddp")
    gpus: int = option(8, "ranks that the table is for", metavar="N", check=positive)
    variants: tuple[str, ...] = option((*REPLICATED, *SHARDED), metavar="NAME",
        choices=(*REPLICATED, *SHARDED), help="variants to predict (default: all)")
    results: Path | None = option(None, metavar="FOLDER", help=(
        "results of the benchmark at the traces' sizes: the time of none is taken from them, since "
        "the profiler slows a step down (default: the traces' own time)"))
    validate: tuple[Path, ...] = option((), metavar="FOLDER", help=(
        "folders of results of the benchmark: print how far predictions are off (default: none)"))
    gpus_per_host: int = option(8, "GPUs that share a host's fast links", group="links",
        metavar="N", check=positive)
    host_bandwidth: float = option(50.0, "network between hosts, in GB/s per GPU", check=positive)
    host_latency: float = option(15.0, "of one message between hosts, in microseconds",
        check=positive)
    preset: str | None = option(None, "model size (default: the traces')", group="what is trained",
        choices=tuple(PRESETS))
    d_model: int | None = _size("width of the residual stream, in features")
    num_layers: int | None = _size("number of blocks")
    num_heads: int | None = _size("attention heads per block")
    d_ff: int | None = _size("width of the feed-forward layer, in features")
    vocab_size: int | None = _size("size of the vocabulary, in tokens")
    context_length: int | None = _size("sequence length, in tokens")
    batch_size: int | None = _size("sequences per rank and step")
    bucket_size_mb: float | None = option(None, "size of buckets in MiB (default: each variant's)",
        metavar="MIB", check=positive)
    worthwhile: float = option(0.8, "efficiency below which more GPUs do not pay", group="output",
        check=positive)
    output: Path = option(Path("simulation.png"), "the picture", metavar="FILE")
# fmt: on


@ending_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(Options, arguments, prog=PROGRAM, description=__doc__)
    try:
        check_file("--output", options.output)
        links = Network(0, 0, options.gpus_per_host, options.host_latency / 1e6,
                        options.host_bandwidth * 1e9)  # fmt: skip
        found = calibrate(options.traces, links)
        if options.results:
            found = found.matched(measured_steps([options.results], found.shape)["none"])
        shape = shape_of(options, found.shape)
        for folder in options.validate:
            print(validation(found, folder), end="\n\n")
    except (ValueError, OSError) as error:
        return refuse(PROGRAM, error, speaks=is_alone())
    print(table(found, shape, options))
    draw_curves(found, shape, options)
    print(f"picture: {options.output}")
    return 0


def shape_of(options: Options, traced: Shape) -> Shape:
    """Returns what is to be predicted: the traces' shape with the sizes that were given."""
    model = PRESETS[options.preset] if options.preset else traced.model
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name)}
    return replace(
        traced, model=replace(model, **given), batch_size=options.batch_size or traced.batch_size,
        bucket_size_mb=options.bucket_size_mb or traced.bucket_size_mb,
    )  # fmt: skip


def efficiency(found: Calibration, shape: Shape, outcome: Outcome) -> float:
    """Returns the step of one GPU alone over this step: its share of N times one GPU's speed."""
    return simulate(found, "none", shape, 1).step / outcome.step


def draw_curves(found: Calibration, shape: Shape, options: Options) -> None:
    curves = {
        name: [efficiency(found, shape, simulate(found, name, shape, n)) for n in COUNTS]
        for name in options.variants
        if name != "none"
    }
    stops = {name: last_that_pays(curve, options.worthwhile) for name, curve in curves.items()}
    size = shape.gradient_bytes / shape.width / 1e6
    draw_efficiency(
        curves, COUNTS, stops, options.worthwhile,
        "Efficiency of each variant, and the last number of GPUs at which it pays",
        f"Predicted from {found.ranks} ranks. {size:,.0f} M parameters, {shape.dtype}, "
        f"{shape.batch_size} x {shape.model.context_length} tokens per GPU; "
        f"{found.network.bandwidth / 1e9:,.3g} GB/s in a host, {options.host_bandwidth:g} between",
        options.gpus_per_host, options.output,
    )  # fmt: skip


def last_that_pays(curve: Sequence[float], limit: float) -> str:
    paying = [n for n, value in zip(COUNTS, curve, strict=True) if value >= limit]
    return "pays throughout" if curve[-1] >= limit else f"up to {max(paying, default=0):,}"


def table(found: Calibration, shape: Shape, options: Options) -> str:
    rows = []
    for name in options.variants:
        outcome = simulate(found, name, shape, options.gpus)
        memory = predict_memory(
            name, shape.model, ranks=options.gpus, batch_size=shape.batch_size,
            dtype=shape.dtype, bucket_size_mb=shape.bucket_size_mb,
        )  # fmt: skip
        rows.append({
            "name": name, "step": outcome.step * 1e3, "exposed": outcome.exposed * 1e3,
            "contention": outcome.contention * 1e3,
            "efficiency": efficiency(found, shape, outcome),
            "tokens": options.gpus * shape.tokens / outcome.step,
            "memory": sum(memory.values()) / GIB, "traced": name in ("none", *found.contention),
        })  # fmt: skip
    columns = [
        Column("name", "variant"), Column("step", "step ms", ".2f"),
        Column("exposed", "exposed ms", ".2f"), Column("contention", "contention ms", ".2f"),
        Column("efficiency", None, ".1%"), Column("tokens", "tokens/s", ",.0f"),
        Column("memory", "GiB", ".2f"),
        Column("traced", None, lambda is_so: "yes" if is_so else "–"),
    ]  # fmt: skip
    return format_table(columns, rows, f"Predicted for {options.gpus} ranks")


if __name__ == "__main__":
    sys.exit(main())
