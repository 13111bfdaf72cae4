"""Predicts the step time and memory of every variant on other numbers of GPUs, from traces.

    python benchmark_ddp.py --profile --profile-output-dir traces     what is read
    python -m ddp_by_hand.experiments.simulate traces --gpus 64       a table and simulation.png
    python -m ddp_by_hand.experiments.simulate traces --gpus 64 --preset 1.2b --context-length 1024
    python -m ddp_by_hand.experiments.simulate traces --results timed --validate others*
                                                              how far off it was

Not modelled: ranks that are slow by chance, links shared with other jobs, and matrix products whose
rate depends on their size. docs/simulate.md says what is.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_by_hand.experiments.simulate.calibrate import Calibration, calibrate
from ddp_by_hand.lm.exchange import VARIANTS, Network
from ddp_by_hand.lm.memory import VARIANTS as KNOWN_MEMORY
from ddp_by_hand.lm.memory import predict_memory
from ddp_by_hand.lm.model import PRESETS
from ddp_by_hand.lm.shape import Shape
from ddp_by_hand.measure import Column, Results, format_table
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.curves import draw_efficiency
from ddp_by_hand.measure.options import is_writable, option, positive, program, requires

MOST_GPUS = 1_000_000  # a ring's latency is then seconds, and nothing like it was measured
MEMORY_ONLY = tuple(name for name in KNOWN_MEMORY if name not in VARIANTS)
NOTES = (
    "step = computed + exposed + contention; computed: what none computes (of the optimizer a",
    "  rank's part where it is sharded), and what the variant copies and launches",
    "diloco: the mean of the steps of a round (--every), of which the last one has the exchange",
    "contention of: the variant whose traces, or results, tell how computation and communication",
    "  slow each other; another one's where a variant itself was not measured",
    f"{' and '.join(MEMORY_ONLY)}: PyTorch decides inside what it sends when, and in which stream,",
    "  so their steps are not predicted from these traces; measure them with benchmark_ddp.py",
)


# fmt: off
@dataclass(frozen=True)
class Options:
    traces: tuple[Path, ...] = option(help="folders that benchmark_ddp.py --profile wrote")
    gpus: int = option(8, "ranks that the table is for", metavar="N", check=requires(
        lambda n: 0 < n <= MOST_GPUS, f"{{}}: give a number of 1 to {MOST_GPUS:,} GPUs"))
    results: tuple[Path, ...] = option((), metavar="FOLDER", help=(
        "results of the benchmark at the traces' sizes, for times without the profiler"))
    validate: tuple[Path, ...] = option((), metavar="FOLDER", help=(
        "folders of results of the benchmark: print how far predictions are off (default: none)"))
    gpus_per_host: int = option(8, "GPUs that share fast links", metavar="N", check=positive)
    host_bandwidth: float = option(50.0, "between hosts, in GB/s per GPU", check=positive)
    host_latency: float = option(15.0, "between hosts, in microseconds", check=positive)
    preset: str | None = option(None, "model size (default: the traces')", choices=tuple(PRESETS))
    context_length: int | None = option(None, "tokens (default: the model's)", check=positive)
    batch_size: int | None = option(None, "per rank (default: the traces')", check=positive)
    bucket_size_mb: float | None = option(None, "in MiB (default: each variant's)", check=positive)
    every: int = option(50, "steps of a round of diloco", metavar="H", check=positive)
    output: Path = option(Path("simulation.png"), "the picture", metavar="FILE", check=is_writable)
# fmt: on


@program("ddp_by_hand.experiments.simulate", Options, needs=["matplotlib"])
def main(options: Options) -> int:
    bandwidth = options.host_bandwidth * 1e9
    links = Network(0, 0, options.gpus_per_host, options.host_latency / 1e6, bandwidth)
    with bad_input():
        found = replace(calibrate(options.traces, links), every=options.every)
        timed = {
            run: own
            for folder in options.results
            for run, own in measured(folder, options.every).items()
        }
        if timed:
            found = found.matched({n: s for (shape, n), s in timed.items() if shape == found.shape})
        for folder in options.validate:
            print(validation(found, folder), end="\n\n")
    model = PRESETS[options.preset] if options.preset else found.shape.model
    model = replace(model, context_length=options.context_length or model.context_length)
    given = {n: x for n in ("batch_size", "bucket_size_mb") if (x := getattr(options, n))}
    shape = replace(found.shape, model=model, **given)
    print(table(found, shape, options.gpus))
    for doubt in found.doubts(timed.get((found.shape, found.ranks), {})):
        print(doubt)
    draw_efficiency(
        lambda name, gpus: found.simulate(name, shape, gpus).step, VARIANTS,
        f"Predicted from {found.ranks} ranks. {sum(shape.gradients.values()) / 1e6:,.0f} M "
        f"parameters, {shape.dtype}, {shape.batch_size} x {model.context_length} tokens per GPU; "
        f"{found.network.bandwidth / 1e9:,.3g} GB/s in a host, {options.host_bandwidth:g} "
        "GB/s between hosts",
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
            "variant": name, "step ms": 1e3 * o.step, "computed ms": 1e3 * o.computed,
            "exposed ms": 1e3 * o.exposed,
            "contention ms": 1e3 * o.contention, "tokens/s": gpus * shape.tokens / o.step,
            "efficiency": found.simulate("none", shape, 1).step / o.step,
            "GiB": sum(memory.values()) / 2**30,
            "contention of": None if name == "none" else found.known(name),
        })  # fmt: skip
    for name in MEMORY_ONLY:
        memory = predict_memory(name, shape.model, bucket_size_mb=shape.bucket_size_mb, **run)
        rows.append({"variant": name, "GiB": sum(memory.values()) / 2**30})
    formats = {"variant": None, "efficiency": ".1%", "tokens/s": ",.0f", "contention of": None}
    columns = [Column(key, None, formats.get(key, ".2f")) for key in rows[0]]
    return "\n".join([format_table(columns, rows, f"Predicted for {gpus:,} ranks"), "", *NOTES])


def measured(folder: Path, every: int) -> dict[tuple[Shape, int], dict[str, float]]:
    """Returns (shape, ranks) -> variant -> seconds of a step, of results with `none`.

    Results of `diloco` count if its rounds had `every` steps.
    """

    def size(config: dict) -> tuple[Shape, int] | None:
        if "clipping" in config or config.get("every", every) != every:
            return None
        return Shape.of(config), config["world_size"]

    if not (folder / "results.jsonl").exists():
        raise ValueError(f"{folder} has no results of benchmark_ddp.py --output-dir {folder}")
    found = Results(folder).fastest_rounds("timing", size)
    found = {run: {v: ms / 1e3 for v, ms in own.items()} for run, own in found.items() if run}
    if not all("none" in own for own in found.values()) or not found:
        raise ValueError(
            f"{folder} has no results of none, beside which others are compared: run "
            f"benchmark_ddp.py --implementations none ddp --output-dir {folder} with its options"
        )
    return found


def validation(found: Calibration, folder: Path) -> str:
    """Compares with results, also of other shapes: the step, and what it is relative to `none`."""
    tables = []
    for (shape, ranks), steps in measured(folder, found.every).items():
        predicted = {v: found.simulate(v, shape, ranks).step for v in VARIANTS if v in steps}
        rows = [{
            "variant": name, "measured ms": 1e3 * steps[name], "predicted ms": 1e3 * step,
            "error": step / steps[name] - 1,
            "error of × none": step / steps[name] / (predicted["none"] / steps["none"]) - 1,
        } for name, step in predicted.items()]  # fmt: skip
        columns = [Column(k, None, "+.1%" if "error" in k else ".2f") for k in [*rows[0]][1:]]
        tables.append(format_table(["variant", *columns], rows, f"{folder}: {ranks} × {shape}"))
    return "\n\n".join(tables)


if __name__ == "__main__":
    sys.exit(main())
