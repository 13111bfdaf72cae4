"""The table of networks: each variant beside the ordinary step of the same rounds."""

from __future__ import annotations

from experiments.networks.bounds import bound_by
from experiments.price.report import ratio_of_rounds
from experiments.rounds import BASELINE
from measure import OK, Column, format_table, summarize

LEGEND = """\
step ms: complete steps with noise and AdamW, median, 10th and 90th percentile; ratio [low, high]:
to ordinary steps of the same rounds, 95 % interval, which means little below three rounds;
host: until a step is issued, waits for the GPU within it included; kernels: of one step, added up;
bound: which of the two takes at least nine tenths of the step (kernels first)"""
_COLUMNS = (
    "network", "variant", Column("step ms", format=".1f"), Column("p10", format=".1f"),
    Column("p90", format=".1f"), *(Column(key, format=".3f") for key in ("ratio", "low", "high")),
    Column("peak MiB", format=",.0f"), Column("peak ratio", format=".2f"),
    Column("host ms", format=".1f"), Column("kernel ms", format=".1f"),
    Column("launches", format=",d"), Column("bound", right=True),
)  # fmt: skip


def report(cells: list[dict]) -> str:
    """Returns one line for each network and variant, ordinary ones first."""
    lines = []
    for row in dict.fromkeys(cell["row"] for cell in cells):
        own = [cell for cell in cells if cell["row"] == row]
        variants = dict.fromkeys(cell["variant"] for cell in own)
        for variant in sorted(variants, key=lambda name: name != BASELINE):
            lines.append({"network": row, "variant": variant} | _line(own, variant))
    return "\n".join([format_table(_COLUMNS, lines), "", LEGEND])


def _line(cells: list[dict], variant: str) -> dict:
    own = [cell for cell in cells if cell["variant"] == variant]
    good = [cell for cell in own if cell["status"] == OK]
    if not good:
        return {key: own[0][key] for key in ("status", "reason")}
    base = [cell for cell in cells if cell["variant"] == BASELINE and cell["status"] == OK]
    times = summarize([ms for cell in good for ms in cell["step_ms"]])
    peak = max(cell["peak_memory_mb"] for cell in good)
    line = {"step ms": times.median, "p10": times.p10, "p90": times.p90, "peak MiB": peak}
    if {cell["round"] for cell in good} & {cell["round"] for cell in base}:
        found = ratio_of_rounds(good, base, "step_ms")
        line |= {"ratio": found.value, "low": found.low, "high": found.high}
        if least := max(cell["peak_memory_mb"] for cell in base):
            line["peak ratio"] = peak / least
    profiled = next((cell for cell in good if "host_ms" in cell), {})
    names = {"host ms": "host_ms", "kernel ms": "kernel_ms", "launches": "launches"}
    line |= {name: profiled.get(key) for name, key in names.items()}
    return line | {"bound": bound_by(times.median, profiled)}
