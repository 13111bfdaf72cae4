"""Predicts the step time and memory of every variant on other numbers of GPUs, from traces.

    python benchmark_ddp.py --profile --profile-output-dir traces     what is read
    python -m experiments.simulate traces --gpus 64                   a table and simulation.png
    python -m experiments.simulate traces --gpus 64 --preset 1.2b --context-length 1024
    python -m experiments.simulate traces --validate results_ddp/*    how far off it was

Not modelled: ranks that are slow by chance, links shared with other jobs, and matrix products whose
rate depends on their size. docs/simulate.md says what is.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from experiments.simulate.calibrate import Calibration, calibrate
from lm.exchange import VARIANTS, Network
from lm.memory import predict_memory
from lm.model import PRESETS
from lm.shape import Shape
from measure import OK, Column, Results, format_table
from measure.command_line import check_file, ending_quietly, is_alone, refuse
from measure.curves import draw_efficiency
from measure.options import option, parse_options, positive


# fmt: off
@dataclass(frozen=True)
class Options:
    traces: Path = option(help="folder that benchmark_ddp.py --profile wrote, with none and ddp")
    gpus: int = option(8, "ranks that the table is for", metavar="N", check=positive)
    results: Path | None = option(None, metavar="FOLDER", help=(
        "results of the benchmark at the traces' sizes, for the time of none (default: traces)"))
    validate: tuple[Path, ...] = option((), metavar="FOLDER", help=(
        "folders of results of the benchmark: print how far predictions are off (default: none)"))
    gpus_per_host: int = option(8, "GPUs that share fast links", metavar="N", check=positive)
    host_bandwidth: float = option(50.0, "between hosts, in GB/s per GPU", check=positive)
    host_latency: float = option(15.0, "between hosts, in microseconds", check=positive)
    preset: str | None = option(None, "model size (default: the traces')", choices=tuple(PRESETS))
    context_length: int | None = option(None, "tokens (default: the model's)", check=positive)
    batch_size: int | None = option(None, "per rank (default: the traces')", check=positive)
    bucket_size_mb: float | None = option(None, "in MiB (default: each variant's)", check=positive)
    output: Path = option(Path("simulation.png"), "the picture", metavar="FILE")
# fmt: on


@ending_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(Options, arguments, prog="experiments.simulate", description=__doc__)
    bandwidth = options.host_bandwidth * 1e9
    links = Network(0, 0, options.gpus_per_host, options.host_latency / 1e6, bandwidth)
    try:
        check_file("--output", options.output)
        found = calibrate(options.traces, links)
        if options.results:
            found = found.matched(measured_steps(options.results, found.shape)["none"])
        for folder in options.validate:
            print(validation(found, folder), end="\n\n")
    except (ValueError, OSError) as error:
        return refuse("experiments.simulate", error, speaks=is_alone())
    model = PRESETS[options.preset] if options.preset else found.shape.model
    model = replace(model, context_length=options.context_length or model.context_length)
    given = {n: x for n in ("batch_size", "bucket_size_mb") if (x := getattr(options, n))}
    shape = replace(found.shape, model=model, **given)
    print(table(found, shape, options.gpus))
    draw_efficiency(
        lambda name, gpus: found.simulate(name, shape, gpus).step, VARIANTS,
        f"Predicted from {found.ranks} ranks. {sum(shape.gradients.values()) / 1e6:,.0f} M "
        f"parameters, {shape.dtype}, {shape.batch_size} x {model.context_length} tokens per GPU; "
        f"{found.network.bandwidth / 1e9:,.3g} GB/s in a host, {options.host_bandwidth:g} between",
        options.gpus_per_host, options.output,
    )  # fmt: skip
    print(f"picture: {options.output}")
    return 0


def table(found: Calibration, shape: Shape, gpus: int) -> str:
    rows, run = [], {"batch_size": shape.batch_size, "dtype": shape.dtype, "ranks": gpus}
    for name in VARIANTS:
        o = found.simulate(name, shape, gpus)
        memory = predict_memory(name, shape.model, bucket_size_mb=shape.bucket_size_mb, **run)
        rows.append({
            "variant": name, "step ms": 1e3 * o.step, "exposed ms": 1e3 * o.exposed,
            "contention ms": 1e3 * o.contention, "tokens/s": gpus * shape.tokens / o.step,
            "efficiency": found.simulate("none", shape, 1).step / o.step,
            "GiB": sum(memory.values()) / 2**30,
            "traced": "yes" if name in ("none", *found.contention) else "–",
        })  # fmt: skip
    formats = {"variant": None, "efficiency": ".1%", "tokens/s": ",.0f", "traced": None}
    columns = [Column(key, None, formats.get(key, ".2f")) for key in rows[0]]
    return format_table(columns, rows, f"Predicted for {gpus} ranks")


def measured_steps(folder: Path, shape: Shape) -> dict[str, float]:
    """Returns variant -> seconds of a step: the median of the fastest, least disturbed round."""
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
    config = next((row["config"] for row in Results(folder).rows() if row["kind"] == "timing"), 0)
    if not config:
        raise ValueError(f"{folder}: holds no results of the benchmark")
    shape, ranks, rows = Shape.of(config), config["world_size"], []
    steps = measured_steps(folder, shape)
    none = found.simulate("none", shape, ranks).step / steps["none"]
    for name in (name for name in steps if name in VARIANTS):
        step = found.simulate(name, shape, ranks).step
        rows.append({
            "variant": name, "measured ms": 1e3 * steps[name], "predicted ms": 1e3 * step,
            "error": step / steps[name] - 1, "error of × none": step / steps[name] / none - 1,
        })  # fmt: skip
    columns = [Column(key, None, "+.1%" if "error" in key else ".2f") for key in list(rows[0])[1:]]
    return format_table(["variant", *columns], rows, f"{folder}: {ranks} ranks, {shape}")


if __name__ == "__main__":
    sys.exit(main())
