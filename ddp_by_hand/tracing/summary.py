"""The text beside the picture: configuration, times, slowest operators, how to look further."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dp_clipping.files import write_atomically
from dp_clipping.table import aligned

from .overlap import TIMES, Overlap, overlap
from .phases import EPOCH_PREFIX, LAYER_PREFIXES, PARTS_OF_BACKWARD, PARTS_OF_SHARDED, PHASES
from .trace import Trace
from .waiting import share_clock

RANGES = (EPOCH_PREFIX, *LAYER_PREFIXES, "norm_reduce/", "FSDP::")
LEGEND = (
    "step = computation + exposed + waiting + idle; hidden = overlapped / communication.",
    "exposed: communication while this rank computes nothing (PROFILING.md, Exposed "
    "communication).",
)
WAITING = (
    "waiting: in a collective that a slower rank has not begun, while this rank computes nothing."
)
UNKNOWN = (
    "waiting: not known; it takes the traces of all ranks, on one host's clock. It is in "
    "communication."
)


@dataclass(frozen=True)
class OperatorRow:
    """One line of the table of operators; times in microseconds, self without what it calls."""

    name: str
    calls: int
    total_us: float
    self_us: float


def slowest_operators(profiler, limit: int = 15) -> list[OperatorRow]:
    """Returns the operators with most self time, on the GPU if the profiler saw one, else the CPU.

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
    budget: Sequence[str] = (),
) -> None:
    """Writes the summary of one implementation; `traces` and `trace_files` are one per rank.

    `launches` says, a line each, what was sent when in a step; `plan`, what a private step did
    with each layer; `budget`, what the step's time went into (`describe_budgets`).
    """
    title = f"Profile of {configuration.get('implementation', Path(path).stem)}"
    measured = {trace.rank: overlap(trace) for trace in traces}
    sections = [
        [title, "=" * len(title)],
        _section("Configuration", _values(configuration)),
        _section("Computation and communication, ms per step", _overlap_table(measured, traces)),
        *([_section("Budget of a step, ms", list(budget))] if budget else []),
        *_transfers_section(traces[0]),
        _section("Time per phase, ms per step", _phase_table(measured, traces)),
        *([_section("Launches of one step, rank 0", list(launches))] if launches else []),
        *([_section("Plan of a private step, rank 0", list(plan))] if plan else []),
        _section("Slowest operators, rank 0, ms over the whole trace", _operator_table(operators)),
    ]
    if memory:
        sections.append(_section("Memory", _values(memory)))
    sections.append(_section("How to open the traces", _how_to_open(trace_files)))
    text = "\n\n".join("\n".join(lines) for lines in sections) + "\n"
    write_atomically(path, text)


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, "-" * len(title), *lines]


def _values(values: dict) -> list[str]:
    rows = [(name, str(value)) for name, value in values.items()]
    return aligned(rows, [False, False], rule=False) if rows else []


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f}"


def _overlap_table(measured: dict[int, Overlap], traces: list[Trace]) -> list[str]:
    rows = [["rank", "step", *TIMES[1:], "hidden"]]
    for rank, whole in measured.items():
        step = whole.per_step() or whole
        fraction = step.overlap_fraction
        share = "none" if fraction is None else f"{fraction:.1%}"
        rows.append([str(rank), *(_milliseconds(getattr(step, name)) for name in TIMES), share])
    lines = aligned(rows, [False] + [True] * (len(rows[0]) - 1))
    bases = ", ".join(sorted({whole.basis for whole in measured.values()}))
    counts = sorted({whole.steps for whole in measured.values()})
    over = f"Averages over {', '.join(map(str, counts))} step(s)."
    if counts == [0]:
        over = "The trace does not tell its steps: whole span."
    return [
        *lines,
        "",
        f"Basis: {bases}. {over}",
        *LEGEND,
        WAITING if share_clock(traces) else UNKNOWN,
    ]


def _transfers_section(trace: Trace) -> list[list[str]]:
    """Says which engines communicated: the proof that copies ran on copy engines."""
    if not trace.transfers:
        return []
    count = overlap(trace).steps or 1
    rows = [["engine", "operation", "calls", "ms", "MiB"]]
    for work in sorted(trace.transfers, key=lambda w: (not w.is_copy, -w.time)):
        engine = "copy engines" if work.is_copy else "multiprocessors"
        moved = f"{work.nbytes / count / (1 << 20):.1f}" if work.is_copy else "-"
        calls = f"{work.calls / count:.1f}"
        rows.append([engine, _short(work.name, 51), calls, _milliseconds(work.time / count), moved])
    copied = [work for work in trace.transfers if work.is_copy]
    others = [work for work in trace.transfers if not work.is_copy]
    totals = (
        f"Copy engines moved {sum(w.nbytes for w in copied) / count / (1 << 20):.1f} MiB in "
        f"{_milliseconds(sum(w.time for w in copied) / count)} ms per step; kernels held "
        f"multiprocessors for {_milliseconds(sum(w.time for w in others) / count)} ms."
    )
    numeric = [False, False, True, True, True]
    title = "Communication by engine, rank 0, per step"
    return [_section(title, [*aligned(rows, numeric), "", totals])]


def _phase_table(measured: dict[int, Overlap], traces: list[Trace]) -> list[str]:
    names = [name for name in PHASES if any(name in m.phases for m in measured.values())]
    steps = [whole.per_step() or whole for whole in measured.values()]
    rows = [["phase", *(f"rank {rank}" for rank in measured)]]
    for name in names:
        depth = (name in PARTS_OF_BACKWARD) + 2 * (name in PARTS_OF_SHARDED)
        times = [_milliseconds(step.phases.get(name, 0.0)) for step in steps]
        rows.append(["  " * depth + name, *times])
    lines = aligned(rows, [False] + [True] * len(measured))
    placed = sorted({trace.phase_basis for trace in traces})
    return [*lines, "", f"Phases placed by: {', '.join(placed)}."]


def _operator_table(operators: list[OperatorRow]) -> list[str]:
    rows = [("operator", "calls", "total", "self")]
    for row in operators:
        times = _milliseconds(row.total_us), _milliseconds(row.self_us)
        rows.append((_short(row.name, 51), str(row.calls), *times))
    return aligned(rows, [False, True, True, True])


def _how_to_open(trace_files: list[str]) -> list[str]:
    return [
        *[f"  {file}" for file in trace_files],
        "In Chrome open chrome://tracing and press Load, or drop a file on https://ui.perfetto.dev",
        "(it stays on your machine). Keys W, S zoom, A, D move. Look for the range backward_pass:",
        "communication that continues after its end is not hidden by it.",
    ]


def _is_operator(average) -> bool:
    on_cpu = getattr(average.device_type, "name", "CPU") == "CPU"
    is_range = average.key in PHASES or average.key.startswith(RANGES)
    return on_cpu and not is_range


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
