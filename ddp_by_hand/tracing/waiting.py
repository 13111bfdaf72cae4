"""Measures waiting for a slow rank: a collective's time before its last rank has begun.

A collective that lasts long on one rank has not always much to move. Until the last rank takes
part nothing can be moved, and the ranks that came earlier wait:

        rank 0   ████████ wwwwwwww░░░░          began early, waits for rank 1
        rank 1   ████████████████ ░░░░          the slow one
                                  └ all ranks take part: communication

That takes all ranks of a collective, on one clock. Ranks of one host have one; of several hosts
clocks differ by more than a collective lasts, so there nothing is told apart, and waiting counts
as communication.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .intervals import Interval, difference
from .trace import Trace, load_trace

CLOCKS_DIFFER_BY = 50.0  # µs; a collective cannot end before all have begun it, give or take these


def load_traces(paths: Sequence[str | Path]) -> list[Trace]:
    """Loads the traces of a run's ranks; separates waiting from communication where possible."""
    return tell_waiting([load_trace(path) for path in paths])


def load_runs(folders: Sequence[Path]) -> dict[tuple[str, int], list[Trace]]:
    """Loads what `benchmark_ddp.py --profile` wrote, without private steps.

    Returns (implementation, number of ranks) -> traces of the ranks.

    Raises:
        ValueError: for a folder without traces.
    """
    for folder in folders:
        if not any(folder.glob("*_rank_0_trace.json*")):
            what = "has no traces" if folder.is_dir() else "is no folder"
            raise ValueError(
                f"{folder} {what}: name one that benchmark_ddp.py --profile --profile-output-dir "
                f"{folder} has written"
            )
    runs: dict[tuple[str, int], list[Trace]] = {}
    for path in sorted(p for folder in folders for p in folder.glob("*_rank_0_trace.json*")):
        pattern = path.name.replace("_rank_0_", "_rank_*_")
        traces = load_traces(sorted(path.parent.glob(pattern)))
        of = traces[0].configuration
        if "implementation" in of and "clipping" not in of:
            runs[of["implementation"], of.get("world_size", len(traces))] = traces
    return runs


def tell_waiting(traces: list[Trace]) -> list[Trace]:
    """Moves waiting from each trace's `communication` to its `waiting`.

    The n-th collective of a name is the same one on every rank; a name that some rank has more
    often is left alone, and so is everything if the traces are not of all ranks on one clock.
    """
    if not share_clock(traces):
        return traces
    starts: list[dict[Interval, float]] = [{} for _ in traces]  # call -> when the last began it
    for name in set().union(*(trace.collectives for trace in traces)):
        per_rank = [trace.collectives.get(name, []) for trace in traces]
        if len({len(calls) for calls in per_rank}) > 1:
            continue
        for calls in zip(*per_rank, strict=True):
            last = max(start for start, _ in calls)
            if last <= min(end for _, end in calls) + CLOCKS_DIFFER_BY:
                for own, call in zip(starts, calls, strict=True):
                    own[call] = min(last, call[1])
    return [_split(trace, own) for trace, own in zip(traces, starts, strict=True)]


def share_clock(traces: Sequence[Trace]) -> bool:
    """Returns whether these are all ranks of a run, on one clock, with collectives of all ranks."""
    first = traces[0] if traces else None
    return (
        first is not None
        and first.clock is not None
        and all(trace.clock == first.clock for trace in traces)
        and sorted(trace.rank for trace in traces) == list(range(len(traces)))
        and all(trace.group_sizes <= {len(traces), 1} for trace in traces)
    )


def _split(trace: Trace, begun: dict[Interval, float]) -> Trace:
    """Splits communication; what lies in no collective of `begun` stays as it is."""
    moved = [(start, end) for (_, end), start in begun.items()]
    waited = [(call[0], start) for call, start in begun.items()]
    others = difference(trace.communication, begun)
    communication = sorted(moved + others)
    return replace(trace, communication=communication, waiting=difference(waited, communication))
