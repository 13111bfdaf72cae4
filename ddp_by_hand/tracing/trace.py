"""Read a Chrome trace that torch.profiler wrote, as intervals of computation and communication."""

import gzip
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from . import cpu_rules, gpu_rules
from .intervals import Interval, by_name
from .phases import BOOT, CONFIGURATION, EPOCH_PREFIX, LAYER_PREFIXES, PHASES


@dataclass(frozen=True)
class Trace:
    """Events of one rank, in microseconds on that rank's clock.

    rank           from the trace's distributedInfo, 0 where there is none
    basis          what the intervals are made of: "GPU kernels", or CPU operators as a proxy
    computation    sorted; intervals may overlap (several streams or threads)
    communication  sorted; one interval per collective or kernel, which may overlap too
    phases         name of the phase → its intervals, in order; only phases that occur
    phase_basis    where the phases were placed: on the device, or on the CPU thread
    span           first forward pass to the end of the last optimizer step
    layers         name of a layer's range → time of the work launched in it, all steps together
    collectives    name of a collective → its intervals, in order
    clock          equal for traces whose times can be compared; None if it is not known
    group_sizes    numbers of ranks of the process groups that there were
    kernels        computing work by name within the span; empty without GPU kernels
    transfers      communicating work by name: what copy engines and what kernels moved
    waiting        parts of collectives before the last rank began them: see `waiting`
    gradients      when each gradient of each backward was final, in order
    kinds          "products" (of matrices) and "attention" → their part of the computation
    configuration  what `profile` was told about the run
    """

    rank: int
    basis: str
    computation: list[Interval]
    communication: list[Interval]
    phases: dict[str, list[Interval]]
    phase_basis: str
    span: Interval
    layers: dict[str, float]
    collectives: dict[str, list[Interval]] = field(default_factory=dict)
    clock: tuple | None = None
    group_sizes: frozenset[int] = frozenset()
    waiting: list[Interval] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    kinds: dict[str, list[Interval]] = field(default_factory=dict)
    configuration: dict = field(default_factory=dict)
    kernels: list[gpu_rules.Work] = field(default_factory=list)
    transfers: list[gpu_rules.Work] = field(default_factory=list)


def load_trace(path: str | Path) -> Trace:
    """Reads a trace, `.json` or `.json.gz`.

    The rules that tell computation from communication are in `gpu_rules` if the trace has kernel
    events and in `cpu_rules` otherwise. Raises ValueError, naming the file, if it is not a whole
    trace with at least one operator or kernel.
    """
    document = _read_json(Path(path))
    try:
        events = [_with_interval(e) for e in document["traceEvents"] if e.get("ph") == "X"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: a trace event without name, time or thread ({error})") from error
    has_kernels = any(e.get("cat") == "kernel" for e in events)
    rules = gpu_rules.Rules(events) if has_kernels else cpu_rules.Rules(events)
    if not rules.computation and not rules.communication:
        raise ValueError(f"{path}: the trace holds no operator and no kernel; profile again")
    epochs = _ranges(events, lambda name: name.startswith(EPOCH_PREFIX))
    phases, phase_basis = rules.place_phases(_ranges(events, PHASES.__contains__))
    ranks = document.get("distributedInfo") or {}
    span = _span(phases, epochs, rules.computation + rules.communication)
    kernels, transfers = rules.work_by_name(span)
    return Trace(
        rank=ranks.get("rank", 0),
        basis=rules.basis,
        computation=rules.computation,
        communication=rules.communication,
        phases=phases,
        phase_basis=phase_basis,
        span=span,
        layers=rules.time_in(_ranges(events, lambda name: name.startswith(LAYER_PREFIXES))),
        collectives=rules.collectives(),
        clock=_clock(document),
        gradients=rules.gradients(),
        kinds=rules.kinds(),
        configuration=document.get(CONFIGURATION, {}),
        kernels=kernels,
        transfers=transfers,
        group_sizes=frozenset(len(g.get("ranks") or ()) for g in ranks.get("pg_config") or ()),
    )


def _clock(document: dict) -> tuple | None:
    """Returns the identity of the host's clock, and the time that is called 0 in the trace."""
    found = document.get(BOOT), document.get("baseTimeNanoseconds", 0)
    return None if found[0] is None else found


def _read_json(path: Path) -> dict:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            document = json.load(file, strict=False)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a whole Chrome trace ({reason}); profile again") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path}: not a Chrome trace (no list traceEvents)")
    return document


def _with_interval(event: dict) -> dict:
    """Adds `start` and `end`, and checks for what every rule reads."""
    start = float(event["ts"])
    required = {"name": str(event["name"]), "pid": event["pid"], "tid": event["tid"]}
    return event | required | {"start": start, "end": start + float(event.get("dur", 0))}


def _ranges(events: list[dict], wanted) -> dict[str, list[Interval]]:
    """Returns the record_function ranges on the CPU with these names: name → intervals in order."""
    ranges = [e for e in events if e.get("cat") == "user_annotation" and wanted(e["name"])]
    return by_name(sorted(ranges, key=lambda event: event["start"]))


def _span(phases: dict, epochs: dict, events: list[Interval]) -> Interval:
    """Returns the span of the profiled steps, without what comes before and after them."""
    in_epochs = [interval for intervals in epochs.values() for interval in intervals]
    starts = phases.get("forward_pass") or in_epochs or events
    ends = phases.get("optimizer_step") or in_epochs or events
    return (min(start for start, _ in starts), max(end for _, end in ends))
