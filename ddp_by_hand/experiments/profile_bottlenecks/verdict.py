"""Finds what bounds a private step, from measurements of `experiments.profile_bottlenecks`.

| bound | evidence | its time |
| --- | --- | --- |
| memory | the peak beside the limit; lengths that ran out of it | first from NEAR of it on |
| communication | trace: sent, and nothing computed; without a GPU also ranges | as is |
| norm kernels | ranges of the layers' norms, and the coefficients | the device's share |
| recomputation | the second backward of two-pass modes | the device's share |
| noise | range `noise` | the device's share |
| host | GPU only: a step without the switch less the time in which kernels ran | as is |
| model | forward, the rest of the first backward, sums, optimizer | the device's share |

A range in a GPU's stream also holds the time in which the device waits for the host to launch. So
the time of ranges is multiplied with the share of the step in which the device works, and the rest
is the host's. On a CPU host and device are one, and `host` is no bound of its own.

Shares are of the time in which the device works in the phases, which are timed with the profiling
switch on, and on a GPU of what it idles in a step without: the cost of the switch is no bound.
The complete time that is reported beside them is of steps without it: phases may exceed it.

Gains are predicted from the measured times, and say from which; None where none can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression, median
from typing import Any

from ddp_by_hand.experiments.llama_fsdp.results import MODES, describe_run
from ddp_by_hand.measure import OK, OOM
from ddp_by_hand.measure.growth import Growth, fit_growth
from ddp_by_hand.measure.runs import cells_of

PHASES = (
    "forward", "first backward", "norms", "coefficients", "second backward", "sums", "collectives",
    "noise", "optimizer",
)  # fmt: skip
"""The parts of a step; together they are all of it."""
MODELS = ("forward", "first backward", "sums", "optimizer")  # what a step without privacy has too
NEAR = 0.9  # of the limit
SMALL = 0.02  # of a step; smaller ones are not listed
MODEL, HOST = "model", "host"  # what an ordinary step does too; what launches the work
TWO_PASSES = ("ghost_fsdp", "flash_fsdp")
FLASH = ("flash_fsdp", "flash_bookkeeping_fsdp")


def growths(rows: Sequence[Mapping[str, Any]]) -> dict[str, Growth]:
    """Returns the growth of each phase that all lengths have, of `total`, and of peak `memory`."""
    good = measured(rows)
    series = {"total": [r["median_time_ms"] for r in good]}
    if all(r["peak_memory_mb"] for r in good):
        series["memory"] = [r["peak_memory_mb"] for r in good]
    for name in good[0]["phases_ms"] if good else ():
        if all(name in r["phases_ms"] for r in good):
            series[name] = [r["phases_ms"][name] for r in good]
    lengths = [r["seq_length"] for r in good]
    found = {name: fit_growth(lengths, values) for name, values in series.items()}
    return {name: growth for name, growth in found.items() if growth is not None}


def measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows that have times, from short to long."""
    return sorted((r for r in rows if r["status"] == OK), key=lambda r: r["seq_length"])


@dataclass(frozen=True)
class Bound:
    """One that the step may be bound by.

    Attributes:
        name: see the table above.
        ms: milliseconds of a step; None for memory.
        share: the share of `whole_ms`, or, of memory, of its limit.
        evidence: the measurement.
        change: the option to change, and to what.
        gain_ms: of what the samples of a step take now; None: not predicted.
        how: what the gain follows from.
        samples: of a rank and step, where the change is one of their number: the step itself gets
            longer, so the gain is said for a sample. None: it is a step's.
    """

    name: str
    ms: float | None
    share: float
    evidence: str
    change: str
    gain_ms: float | None = None
    how: str = ""
    samples: int | None = None

    @property
    def gain(self) -> str:
        """Returns the predicted gain in words, after a change; empty if none is predicted."""
        if self.gain_ms is None:
            return ""
        if self.samples is None:
            return f"; predicted gain {self.gain_ms:.1f} ms per step"
        one = self.gain_ms / self.samples
        return f"; predicted gain {one:.{1 if one >= 1 else 2}f} ms per sample"

    def __str__(self) -> str:
        size = f"{self.share:.0%} of the limit" if self.ms is None else f"{self.share:.0%}"
        text = f"{self.name} ({size}): {self.evidence}. Change: {self.change}"
        return text + self.gain + (f" ({self.how})" if self.how else "")


def bounds(rows: Sequence[Mapping[str, Any]], limit_mb: float | None = None) -> list[Bound]:
    """Ranks the bounds of the longest measured length, largest first.

    Memory comes first where it is near its limit.

    `limit_mb`: MiB that a rank may use; default: what the GPU has.

    Raises:
        ValueError: no length has been measured.
    """
    good = measured(rows)
    if not good:
        raise ValueError("no length has been measured: nothing can be said about what bounds it")
    row = good[-1]
    idle, works = times_of(row)
    found = [find(row, works) for find in (_communication, _norms, _recomputation, _noise, _model)]
    timed = [one for one in [*found, _host(row, idle)] if one.share > SMALL]
    memory = _memory(rows, row, limit_mb)
    return ([] if memory is None else [memory]) + sorted(timed, key=lambda b: -b.share)


def described(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describes the mode and the run."""
    return f"{MODES[rows[0]['mode']]}, {describe_run(cells_of(rows))}"


def headline(rows: Sequence[Mapping[str, Any]], limit_mb: float | None = None) -> str:
    """Returns the answer in a sentence or two: what bounds the longest length, what to change."""
    first, *others = bounds(rows, limit_mb)
    length = measured(rows)[-1]["seq_length"]
    text = f"{length:,} tokens are bound by {in_words(first.name)} ({first.share:.0%}"
    text += " of the limit)." if first.ms is None else " of the step)."
    if first.name == MODEL:
        best = max((b for b in others if b.gain_ms), key=lambda b: b.gain_ms, default=None)
        if best is None:
            return f"{text} Of what privacy adds nothing is worth a change."
        text += f" Of what privacy adds, {best.name} ({best.share:.0%}) can be changed most."
        first = best
    return f"{text} Change: {first.change}{first.gain}."


def in_words(name: str) -> str:
    """Returns a bound's name for use behind "bound by"."""
    return f"the {name}" if name in (MODEL, HOST) else name


def profiled_ms(row: Mapping[str, Any]) -> float:
    """Returns the time of the profiled step: the sum of its phases."""
    return sum(row["phases_ms"].values())


def times_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (time that the GPU idles, busy share of the phases) of a step.

    The idle time is that of a step without the profiling switch, which delays launches itself.
    """
    if row["device_type"] != "cuda":
        return 0.0, 1.0
    busy = row["trace"]["computation"] + row["trace"]["exposed"]
    return max(0.0, row["median_time_ms"] - busy), min(1.0, busy / profiled_ms(row))


def whole_ms(row: Mapping[str, Any]) -> float:
    """Returns the time that shares refer to: busy time of the phases, and idle time."""
    idle, works = times_of(row)
    return idle + works * profiled_ms(row)


def communication_ms(row: Mapping[str, Any]) -> float:
    """Returns the time for which the step is blocked on other ranks.

    Without a GPU waiting is no event of a trace: there the ranges say more. What the trace says is
    of another step: it cannot be more than the phases take in which something is sent.
    """
    if row["num_processes"] == 1:
        return 0.0
    phases, works = row["phases_ms"], times_of(row)[1]
    own = works * phases.get("collectives", 0.0)
    exposed = min(row["trace"]["exposed"], own + works * sum(phases[name] for name in MODELS))
    return exposed if row["device_type"] == "cuda" else max(exposed, own)


def _share(row: Mapping[str, Any], ms: float) -> float:
    return ms / whole_ms(row)


def _communication(row: Mapping[str, Any], works: float) -> Bound:
    ms = communication_ms(row)
    ranges = {n: t["own_ms"] for n, t in row["profile"]["ranges"].items()}
    norms = ranges.get("norm_all_reduce", 0.0)
    size = row["batch_size"]
    if norms > ms / 2:
        change, gain = 'norm_reduction="layerwise" (norms leave during backward)', norms
        samples, how = None, "at most: all of the norm all-reduce hidden"
    else:
        change = f"--batch-size {2 * size} (what is sent does not grow with the batch)"
        gain, samples, how = ms / 2, size, "a step's communication shared by twice the samples"
    return Bound(
        "communication", ms, _share(row, ms),
        f"{ms:.1f} ms of a step wait for {row['num_processes']} ranks", change, gain, how,
        samples,
    )  # fmt: skip


def _norms(row: Mapping[str, Any], works: float) -> Bound:
    phases = row["phases_ms"]
    ms = works * (phases["norms"] + phases["coefficients"])
    slowest, time = max(row["layer_norm_ms"].items(), key=lambda item: item[1])
    first, *others = slowest.split("+")
    name = f"{first} and {len(others)} more in one launch" if others else first
    evidence = f"{ms:.1f} ms of norms and coefficients; slowest: {name} ({works * time:.1f} ms)"
    change, gain, how = "nothing cheaper is known for these shapes", None, ""
    plan = row["plan_seconds"]
    if plan is not None and row["config"].get("norm_algorithm", "auto") != "auto":
        change = "--norm-algorithm auto"
        part = max(0.0, 1 - plan["auto"] / plan["planned"])
        gain = part * works * (phases["norms"] + phases["sums"])
        how = f"the plan's prediction for these layers is {part:.0%} less, norms and sums"
    elif row["mode"] not in FLASH and row["device_type"] == "cuda":
        change = "--use-flash"
        gain = max(0.0, ms - works * phases["forward"])
        how = "fused norms take the operations of a forward, which was measured"
    elif row["mode"] not in FLASH:
        change = "none here; on a GPU --use-flash"
    return Bound("norm kernels", ms, _share(row, ms), evidence, change, gain, how)


def _recomputation(row: Mapping[str, Any], works: float) -> Bound:
    ms = works * row["phases_ms"].get("second backward", 0.0)
    return Bound(
        "recomputation", ms, _share(row, ms), f"{ms:.1f} ms of a second backward",
        "--bookkeeping (one backward; it keeps what sums need, so mind the memory)", ms,
        "the second backward is not run, its sums are formed all the same",
    )  # fmt: skip


def _noise(row: Mapping[str, Any], works: float) -> Bound:
    ms = works * row["phases_ms"]["noise"]
    return Bound(
        "noise", ms, _share(row, ms), f"{ms:.1f} ms, once per step, whatever the batch",
        f"--batch-size {2 * row['batch_size']}", ms / 2, "shared by twice the samples",
        row["batch_size"],
    )  # fmt: skip


def _host(row: Mapping[str, Any], idle: float) -> Bound:
    computing = whole_ms(row) - idle
    return Bound(
        HOST, idle, _share(row, idle),
        f"{idle:.1f} ms of a step in which the GPU waits to be given work",
        f"--batch-size {2 * row['batch_size']}"
        + ("" if row["mode"] in FLASH else ", or --use-flash (a launch serves many layers)"),
        min(idle / 2, computing), "the same launches, shared by twice the samples",
        row["batch_size"],
    )  # fmt: skip


def _model(row: Mapping[str, Any], works: float) -> Bound:
    phases = row["phases_ms"]
    ms = works * sum(phases[name] for name in MODELS)
    if row["num_processes"] > 1:  # parameters are gathered in there
        inside = communication_ms(row) - works * phases.get("collectives", 0.0)
        ms -= max(0.0, inside)
    return Bound(
        MODEL, ms, _share(row, ms), f"{ms:.1f} ms of what a step without privacy takes too",
        "none for privacy: what makes ordinary training faster (a narrower dtype, a faster device)",
    )  # fmt: skip


def _memory(
    rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], limit_mb: float | None
) -> Bound | None:
    limit = limit_mb or row["device_memory_mb"]
    failed = sorted(r["seq_length"] for r in rows if r["status"] == OOM)
    peak = row["peak_memory_mb"]
    if peak is None or not (failed or (limit and peak > NEAR * limit)):
        return None
    of_limit = f" of {limit:,.0f}" if limit else ""
    evidence = f"{peak:,.0f}{of_limit} MiB at {row['seq_length']} tokens"
    if failed:
        evidence += f"; out of memory at {', '.join(map(str, failed))}"
    size = row["batch_size"]
    if size > 1:
        change, how = f"--batch-size {size // 2} in microbatches (BatchMemoryManager)", ""
        fixed = fixed_memory(rows)
        if fixed is not None:
            then = fixed + (peak - fixed) * (size // 2) / size
            how = f"predicted peak {then:,.0f} MiB: {fixed:,.0f} do not grow with the tokens"
    elif row["mode"] not in TWO_PASSES:
        change, how = "leave out --bookkeeping: two passes keep nothing for the sums", ""
    else:
        change, how = "more ranks: --num-processes (weights and gradients are sharded)", ""
    share = peak / limit if limit else 1.0
    return Bound("memory", None, share, evidence, change, None, how)


def fixed_memory(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the MiB at zero tokens of a line through the peaks; None if it does not rise."""
    good = [r for r in measured(rows) if r["peak_memory_mb"]]
    if len(good) < 2:
        return None
    line = linear_regression([r["seq_length"] for r in good], [r["peak_memory_mb"] for r in good])
    return line.intercept if min(line) > 0 else None


def overhead(row: Mapping[str, Any]) -> float:
    """Returns the cost of the profiling switch: a step with it over one without."""
    return median(row["step_with_profiling_ms"]) / row["median_time_ms"]


def as_json(rows: Sequence[Mapping[str, Any]], limit_mb: float | None) -> dict[str, Any]:
    """Returns the content of `verdict.json`; shares are of `whole_ms`."""
    longest = measured(rows)[-1]
    found = bounds(rows, limit_mb)
    return {
        "headline": headline(rows, limit_mb),
        "ranked": [str(bound) for bound in found],
        "seq_length": longest["seq_length"],
        "profiled_step_ms": profiled_ms(longest),
        "whole_ms": whole_ms(longest),
        "total_ms": longest["median_time_ms"],
        "bounds": [asdict(bound) for bound in found],
        "growth": {name: asdict(growth) for name, growth in growths(rows).items()},
    }
