"""Rows of results to the comparison table and picture, and to the exit status."""

import math

from bench.gate import TOLERANCE
from bench.settings import Settings, label
from bench.worker import GATE, TIMING, plan
from lm.model import flops_per_token
from measure import (
    OK,
    UNAVAILABLE,
    Column,
    Results,
    draw_comparison,
    format_table,
    peak_flops,
    ratio,
    summarize,
)

FLOOR, REFERENCE = "none", "torch_ddp"
MIB = 1 << 20
NOISY = 1.5  # 90th over 10th percentile of the floor, from which a comparison says little


def report(settings: Settings, world_size: int, device: str) -> tuple[str, int]:
    """The text to print, and the exit status: 1 if a gradient was wrong or a cell failed."""
    rows = comparison(settings, world_size, device)
    title = (
        f"{world_size} ranks on {device}, {settings.batch_size} sequences of "
        f"{settings.model.context_length} tokens a rank and step, {settings.dtype}"
    )
    picture = settings.output_dir / "comparison.png"
    draw_comparison(
        [_for_picture(row) for row in rows],
        picture,
        title="Step time, and what communication adds to it",
        subtitle=title,
        baseline=FLOOR if any(r["label"] == FLOOR for r in rows) else None,
        reference=REFERENCE if any(r["label"] == REFERENCE for r in rows) else None,
    )
    table = format_table(columns(rows), rows, title=title)
    text = f"{table}\n\n{_legend(rows, device)}\n\nresults: {Results(settings.output_dir).path}\n"
    return text + f"picture: {picture}", int(any(_is_bad(row) for row in rows))


def columns(rows: list[dict]) -> list[Column]:
    """About 130 characters together; MFU only where the device's peak is known."""
    mfu = [Column("mfu", "MFU", ".1%")] if any(row.get("mfu") for row in rows) else []
    return [
        Column("label", "implementation"),
        Column("gradient_error", "error", _error),
        Column("step", "step ms [p10, p90]", right=True),
        Column("tokens_per_second", "tokens/s", ",.0f"),
        Column("exposed_ms", "exposed ms", _milliseconds),
        Column("to_floor", f"× {FLOOR}", right=True),
        Column("to_reference", f"× {REFERENCE} [95 %]", right=True),
        Column("collectives", "calls", ",d"),
        Column("sent_mb", "MiB sent", ",.1f"),
        Column("peak_memory_mb", "peak MiB", ",.0f"),
        *mfu,
    ]


def comparison(settings: Settings, world_size: int, device: str) -> list[dict]:
    """One row an implementation, in table order, from whatever has been measured so far."""
    measured = {row["key"]: row for row in Results(settings.output_dir).rows()}
    cells = {
        name: [
            row
            for cell in plan(settings)
            if cell.implementation == name
            and (row := measured.get(cell.row(settings, world_size, device)["key"]))
        ]
        for name in settings.implementations
    }
    rounds = {
        name: {r["round"]: r["step_ms"] for r in rows if r["kind"] == TIMING and r["status"] == OK}
        for name, rows in cells.items()
    }
    return [
        _row(name, cells[name], rounds, settings, world_size, device)
        for name in settings.implementations
    ]


def _row(
    name: str, cells: list[dict], rounds: dict, settings: Settings, world_size: int, device: str
) -> dict:
    failed = [row for row in cells if row["status"] != OK]
    row: dict = {"label": label(name), "status": OK}
    gate = next((r for r in cells if r["kind"] == GATE and r["status"] == OK), None)
    if gate:
        error = gate["gradient_error"]
        row["gradient_error"] = math.inf if error is None else error  # JSON knows no infinity
    if failed or not rounds[name]:
        reason = failed[0].get("reason") if failed else "not measured yet"
        return {**row, "status": failed[0]["status"] if failed else "missing", "reason": reason}
    samples = [ms for steps in rounds[name].values() for ms in steps]
    times = summarize(samples)
    tokens = world_size * settings.batch_size * settings.model.context_length
    last = [r for r in cells if r["kind"] == TIMING][-1]
    memory = [r["peak_memory_bytes"] for r in cells if r.get("peak_memory_bytes")]
    return {
        **row,
        "samples_ms": samples,
        "median_ms": times.median,
        "low_ms": times.p10,
        "high_ms": times.p90,
        "step": f"{_milliseconds(times.median)} "
        f"[{_milliseconds(times.p10)}, {_milliseconds(times.p90)}]",
        "tokens_per_second": tokens / times.median * 1e3,
        "exposed_ms": _exposed(name, times.median, rounds),
        "to_floor": _ratio_text(_ratio(rounds, name, FLOOR), interval=False),
        "to_reference": _ratio_text(_ratio(rounds, name, REFERENCE), interval=True),
        "ratio_to_baseline": _ratio(rounds, name, FLOOR),
        "ratio_to_reference": _ratio(rounds, name, REFERENCE),
        "collectives": last.get("collectives"),
        "sent_mb": last["bytes"] / MIB if "bytes" in last else None,
        "peak_memory_mb": max(memory) / MIB if memory else None,
        "mfu": _mfu(settings, tokens / world_size / times.median * 1e3, device),
    }


def _exposed(name: str, median: float, rounds: dict) -> float | None:
    if name == FLOOR or not rounds.get(FLOOR):
        return None
    floor = summarize([ms for steps in rounds[FLOOR].values() for ms in steps]).median
    return median - floor


def _ratio(rounds: dict, name: str, other: str) -> tuple[float, float, float] | None:
    """Over the rounds that both have finished."""
    common = sorted(set(rounds[name]) & set(rounds.get(other, {})))
    if not common or name == other:
        return None
    result = ratio([rounds[name][r] for r in common], [rounds[other][r] for r in common])
    return result.value, result.low, result.high


def _ratio_text(value: tuple[float, float, float] | None, interval: bool) -> str | None:
    if value is None:
        return None
    return f"{value[0]:.3f}" + (f" [{value[1]:.3f}, {value[2]:.3f}]" if interval else "")


def _mfu(settings: Settings, tokens_per_second: float, device: str) -> float | None:
    dtype = "float32" if settings.dtype == "float32" else "bfloat16"
    peak = peak_flops(device, dtype)
    return flops_per_token(settings.model) * tokens_per_second / peak if peak else None


def _error(value: float) -> str:
    return f"{value:.1e}" + ("" if value <= TOLERANCE else " WRONG")


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _is_bad(row: dict) -> bool:
    wrong = row.get("gradient_error", 0.0) > TOLERANCE
    return wrong or row["status"] not in (OK, UNAVAILABLE)


def _for_picture(row: dict) -> dict:
    keys = ("samples_ms", "median_ms", "low_ms", "high_ms", "exposed_ms", "peak_memory_mb")
    rest = ("status", "reason", "ratio_to_baseline", "ratio_to_reference")
    wrong = row.get("gradient_error", 0.0) > TOLERANCE and row["label"] not in (FLOOR, REFERENCE)
    label = row["label"] + (" (WRONG)" if wrong else "")
    return {"label": label, **{key: row.get(key) for key in (*rest, *keys)}}


def _legend(rows: list[dict], device: str) -> str:
    memory = "the process's memory" if device == "cpu" else "the GPU's allocated memory"
    lines = [
        f"error         largest relative error of a float32 gradient, against one process on the "
        f"whole batch ({FLOOR}: on its own shard); wrong above {TOLERANCE:g}",
        "step          of the slowest rank: median over all timed steps, with its spread; "
        "warmup is not timed",
        f"exposed       what communication adds, by waiting and by contention: step minus {FLOOR}",
        "×             ratio of step times, below 1 is faster; [95 %]: confidence interval over "
        "the rounds",
        "calls, sent   collectives that a step starts, and bytes of gradients handed to them; –: "
        "the implementation has no stats()",
        f"peak          of {memory}, the largest over ranks and rounds",
    ]
    if any(row.get("mfu") for row in rows):
        lines.append("MFU           model FLOPs per second over the GPU's peak")
    floor = next((row for row in rows if row["label"] == FLOOR and row["status"] == OK), None)
    if floor and floor["high_ms"] > NOISY * floor["low_ms"]:
        lines.append(
            f"The machine was busy: steps of {FLOOR} took {floor['low_ms']:.0f} to "
            f"{floor['high_ms']:.0f} ms. Close other programs, or raise --rounds, before you "
            "compare."
        )
    return "\n".join(lines)
