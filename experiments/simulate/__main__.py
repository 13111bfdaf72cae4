#!/usr/bin/env python3
"""Predicts the step time and memory of every variant on other numbers of GPUs, from traces.

    python benchmark_ddp.py --profile --profile-output-dir traces     what is read
    python -m experiments.simulate traces --gpus 64                   a table and simulation.png
    python -m experiments.simulate traces --gpus 64 --preset 1.2b --context-length 1024
    python -m experiments.simulate traces --validate results_ddp/*    how far off it was

The equations are in the docstrings of `calibrate` (computation, contention) and `step`
(collectives, the simulation). Memory is that of lm/memory.py. Not modelled: ranks that are slow by
chance, links shared with other jobs, and matrix products whose rate depends on their size.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from experiments.simulate.calibrate import Calibration, calibrate
from experiments.simulate.step import VARIANTS, Network
from lm.memory import predict_memory
from lm.model import PRESETS
from lm.shape import Shape
from measure import OK, Column, Results, format_table
from measure.command_line import check_file, ending_quietly, is_alone, refuse
from measure.curves import draw_efficiency
from measure.options import option, parse_options, positive

PROGRAM = "experiments.simulate"
COUNTS = tuple(2**i for i in range(11))  # GPUs in the picture
PAYS = 0.8  # the least efficiency that does


# fmt: off
@dataclass(frozen=True)
class Options:
    traces: Path = option(help="folder that benchmark_ddp.py --profile wrote, with none and ddp")
    gpus: int = option(8, "ranks that the table is for", metavar="N", check=positive)
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
    context_length: int | None = option(None, "sequence length, in tokens (default: the model's)",
        metavar="N", check=positive)
    batch_size: int | None = option(None, "sequences per rank and step (default: the traces')",
        metavar="N", check=positive)
    bucket_size_mb: float | None = option(None, "size of buckets in MiB (default: each variant's)",
        metavar="MIB", check=positive)
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
            found = found.matched(measured_steps(options.results, found.shape)["none"])
        for folder in options.validate:
            print(validation(found, folder), end="\n\n")
    except (ValueError, OSError) as error:
        return refuse(PROGRAM, error, speaks=is_alone())
    model = PRESETS[options.preset] if options.preset else found.shape.model
    model = replace(model, context_length=options.context_length or model.context_length)
    changed = {n: getattr(options, n) for n in ("batch_size", "bucket_size_mb")}
    changed = {name: value for name, value in changed.items() if value}
    shape = replace(found.shape, model=model, **changed)
    print(table(found, shape, options.gpus))
    draw_curves(found, shape, options)
    print(f"picture: {options.output}")
    return 0


def draw_curves(found: Calibration, shape: Shape, options: Options) -> None:
    alone = found.simulate("none", shape, 1).step
    curves = {
        name: [alone / found.simulate(name, shape, n).step for n in COUNTS] for name in VARIANTS[1:]
    }
    size = shape.gradient_bytes / shape.width / 1e6
    draw_efficiency(
        curves, COUNTS, {name: last_that_pays(curve) for name, curve in curves.items()}, PAYS,
        "Efficiency of each variant, and the last number of GPUs at which it pays",
        f"Predicted from {found.ranks} ranks. {size:,.0f} M parameters, {shape.dtype}, "
        f"{shape.batch_size} x {shape.model.context_length} tokens per GPU; "
        f"{found.network.bandwidth / 1e9:,.3g} GB/s in a host, {options.host_bandwidth:g} between",
        options.gpus_per_host, options.output,
    )  # fmt: skip


def last_that_pays(curve: Sequence[float]) -> str:
    paying = [n for n, value in zip(COUNTS, curve, strict=True) if value >= PAYS]
    return "pays throughout" if curve[-1] >= PAYS else f"up to {max(paying, default=0):,}"


def table(found: Calibration, shape: Shape, gpus: int) -> str:
    rows, alone = [], found.simulate("none", shape, 1).step
    for name in VARIANTS:
        outcome = found.simulate(name, shape, gpus)
        memory = predict_memory(
            name, shape.model, ranks=gpus, batch_size=shape.batch_size,
            dtype=shape.dtype, bucket_size_mb=shape.bucket_size_mb,
        )  # fmt: skip
        rows.append({
            "name": name, "step": outcome.step * 1e3, "exposed": outcome.exposed * 1e3,
            "contention": outcome.contention * 1e3, "efficiency": alone / outcome.step,
            "tokens": gpus * shape.tokens / outcome.step, "memory": sum(memory.values()) / 2**30,
            "traced": "yes" if name in ("none", *found.contention) else "–",
        })  # fmt: skip
    columns = [
        Column("name", "variant"), Column("step", "step ms", ".2f"),
        Column("exposed", "exposed ms", ".2f"), Column("contention", "contention ms", ".2f"),
        Column("efficiency", None, ".1%"), Column("tokens", "tokens/s", ",.0f"),
        Column("memory", "GiB", ".2f"), Column("traced"),
    ]  # fmt: skip
    return format_table(columns, rows, f"Predicted for {gpus} ranks")


def measured_steps(folder: Path, shape: Shape) -> dict[str, float]:
    """Returns variant -> seconds of a step: the median of its fastest round.

    Other programs on the machine only ever slow a round down.
    """
    found: dict[str, float] = {}
    for row in Results(folder).rows():
        if row["kind"] == "timing" and row["status"] == OK and Shape.of(row["config"]) == shape:
            step = median(row["step_ms"]) / 1e3
            found[row["implementation"]] = min(step, found.get(row["implementation"], step))
    if "none" not in found:
        raise ValueError(f"{folder}: has no result of none at these sizes; measure it too")
    return found


def validation(found: Calibration, folder: Path) -> str:
    """Compares with results, also of other shapes: the step, and what it is relative to `none`."""
    configs = [row["config"] for row in Results(folder).rows() if row["kind"] == "timing"]
    if not configs:
        raise ValueError(f"{folder}: holds no results of the benchmark")
    shape, ranks = Shape.of(configs[0]), configs[0]["world_size"]
    steps, rows = measured_steps(folder, shape), []
    for name, step in steps.items():
        if name in VARIANTS:
            predicted = found.simulate(name, shape, ranks).step
            ratio, expected = (
                s / found_none
                for s, found_none in (
                    (step, steps["none"]),
                    (predicted, found.simulate("none", shape, ranks).step),
                )
            )
            rows.append({
                "name": name, "measured": step * 1e3, "predicted": predicted * 1e3,
                "error": predicted / step - 1, "ratio": ratio, "expected": expected,
                "off": expected / ratio - 1,
            })  # fmt: skip
    columns = [
        Column("name", "variant"), Column("measured", "measured ms", ".2f"),
        Column("predicted", "predicted ms", ".2f"), Column("error", None, "+.1%"),
        Column("ratio", "x none", ".3f"), Column("expected", "predicted", ".3f"),
        Column("off", "error", "+.1%"),
    ]  # fmt: skip
    return format_table(columns, rows, f"{folder}: {ranks} ranks, {shape}")


if __name__ == "__main__":
    sys.exit(main())
