"""The text beside the picture: configuration, times, slowest operators, how to look further."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import written_whole
from .overlap import TIMES, Overlap, overlap
from .phases import EPOCH_PREFIX, LAYER_PREFIXES, PARTS_OF_BACKWARD, PARTS_OF_SHARDED, PHASES
from .trace import Trace
from .waiting import share_clock

RANGES = (EPOCH_PREFIX, *LAYER_PREFIXES, "norm_reduce/", "FSDP::")


@dataclass(frozen=True)
class OperatorRow:
    """One line of the table of operators; times in microseconds, self without what it calls."""

    name: str
    calls: int
    total_us: float
    self_us: float


def slowest_operators(profiler, limit: int = 15) -> list[OperatorRow]:
    """The operators with most self time: on the GPU if the profiler saw one, else on the CPU.

    Rows of kernels are left out, since their time already belongs to the operators that launched
    them; so are ranges, our own (phases, epochs, layers) and FSDP's.
    """
    averages = [a for a in profiler.key_averages() if _is_operator(a)]
    on_gpu = any(a.self_device_time_total for a in averages)
    rows = [
        OperatorRow(a.key, a.count, a.device_time_total, a.self_device_time_total)
        if on_gpu
        else OperatorRow(a.key, a.count, a.cpu_time_total, a.self_cpu_time_total)
        for a in averages
    ]
    return sorted(rows, key=lambda row: -row.self_us)[:limit]


def write_summary(
    path: str | Path,
    configuration: dict,
    traces: list[Trace],
    operators: list[OperatorRow],
    trace_files: list[str],
    memory: dict | None = None,
    launches: Sequence[str] = (),
    plan: Sequence[str] = (),
) -> None:
    """Write the summary of one implementation; `traces` and `trace_files` are one per rank.

    `launches` says, a line each, what was sent when in a step; `plan`, what a private step did
    with each layer.
    """
    title = f"Profile of {configuration.get('implementation', Path(path).stem)}"
    measured = {trace.rank: overlap(trace) for trace in traces}
    sections = [
        [title, "=" * len(title)],
        _section("Configuration", [f"{name:<28} {value}" for name, value in configuration.items()]),
        _section("Computation and communication, ms per step", _overlap_table(measured, traces)),
        _section("Time per phase, ms per step", _phase_table(measured, traces)),
        *([_section("Launches of one step, rank 0", list(launches))] if launches else []),
        *([_section("Plan of a private step, rank 0", list(plan))] if plan else []),
        _section("Slowest operators, rank 0, ms over the whole trace", _operator_table(operators)),
    ]
    if memory:
        sections.append(_section("Memory", [f"{k:<28} {v}" for k, v in memory.items()]))
    sections.append(_section("How to open the traces", _how_to_open(trace_files)))
    text = "\n\n".join("\n".join(lines) for lines in sections) + "\n"
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, "-" * len(title), *lines]


def _overlap_table(measured: dict[int, Overlap], traces: list[Trace]) -> list[str]:
    titles = ("step", *TIMES[1:])
    widths = [max(len(title) + 2, 11) for title in titles]
    heading = "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
    lines = [f"{'rank':<6}{heading}{'overlap':>10}"]
    for rank, whole in measured.items():
        step = whole.per_step() or whole
        columns = zip(TIMES, widths, strict=True)
        times = "".join(f"{getattr(step, name) / 1000:>{width}.3f}" for name, width in columns)
        fraction = step.overlap_fraction
        share = "none" if fraction is None else f"{fraction:.1%}"
        lines.append(f"{rank:<6}{times}{share:>10}")
    counts = sorted({whole.steps for whole in measured.values()})
    bases = sorted({whole.basis for whole in measured.values()})
    steps = ", ".join(str(count) for count in counts)
    return [
        *lines,
        "",
        f"Basis: {', '.join(bases)}. Averages over {steps} step(s)."
        if counts != [0]
        else f"Basis: {', '.join(bases)}. The trace does not tell its steps: whole span.",
        "step = computation + exposed + waiting + idle; overlap = overlapped / communication.",
        "exposed: communication while this rank computes nothing (PROFILING.md, Exposed "
        "communication).",
        "waiting: in a collective that a slower rank has not begun, while this rank computes "
        "nothing."
        if share_clock(traces)
        else "waiting: not known; it takes the traces of all ranks, on one host's clock. It is in "
        "communication.",
    ]


def _phase_table(measured: dict[int, Overlap], traces: list[Trace]) -> list[str]:
    names = [name for name in PHASES if any(name in m.phases for m in measured.values())]
    lines = [f"{'phase':<28}" + "".join(f"{f'rank {rank}':>12}" for rank in measured)]
    for name in names:
        steps = [whole.per_step() or whole for whole in measured.values()]
        depth = (name in PARTS_OF_BACKWARD) + 2 * (name in PARTS_OF_SHARDED)
        title = "  " * depth + name
        lines.append(
            f"{title:<28}" + "".join(f"{s.phases.get(name, 0.0) / 1000:>12.3f}" for s in steps)
        )
    placed = sorted({trace.phase_basis for trace in traces})
    return [*lines, "", f"Phases placed by: {', '.join(placed)}."]


def _operator_table(operators: list[OperatorRow]) -> list[str]:
    lines = [f"{'operator':<52}{'calls':>8}{'total':>12}{'self':>12}"]
    for row in operators:
        times = f"{row.total_us / 1000:>12.3f}{row.self_us / 1000:>12.3f}"
        lines.append(f"{_short(row.name, 51):<52}{row.calls:>8}{times}")
    return lines


def _how_to_open(trace_files: list[str]) -> list[str]:
    return [
        *[f"  {file}" for file in trace_files],
        "In Chrome open chrome://tracing and press Load, or drop a file on https://ui.perfetto.dev",
        "(it stays on your machine). Keys W, S zoom, A, D move. Look for the range backward_pass:",
        "communication that goes on after its end is not hidden by it.",
    ]


def _is_operator(average) -> bool:
    on_cpu = getattr(average.device_type, "name", "CPU") == "CPU"
    is_range = average.key in PHASES or average.key.startswith(RANGES)
    return on_cpu and not is_range


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
