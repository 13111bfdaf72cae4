"""Cells of `experiments.llama_fsdp`, the results of a cell, and the summary of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.price.report import growths_of
from lm.runtime import Hardware
from measure import OK, SCHEMA_VERSION, Column, Ratio, cell_key, format_table, ratio, summarize
from measure.words import counted

BASELINE = "no_dp"
MODES = {
    BASELINE: "no_dp",
    "ghost_fsdp": "ghost",
    "flash_fsdp": "flash",
    "bookkeeping_fsdp": "bookkeeping",
    "flash_bookkeeping_fsdp": "flash_bookkeeping",
}
"""Mode -> `grad_sample_mode`."""
RARE = {"enable_profiling": False, "norm_algorithm": "auto"}  # and what they usually are
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class GridSettings:
    """Settings that all cells of a run share; units as in `--help`."""

    model_name: str
    batch_size: int
    num_iter: int
    warmup_iter: int
    learning_rate: float
    sigma: float
    max_grad_norm: float
    clipping: str
    train_embedding: bool
    seed: int
    timeout_s: float
    enable_profiling: bool = False
    norm_algorithm: str = "auto"


@dataclass(frozen=True)
class GridCell:
    mode: str
    seq_length: int
    round: int = 0

    @property
    def clipping_mode(self) -> str:
        return MODES[self.mode]

    @property
    def label(self) -> str:
        return f"{self.mode}, {self.seq_length} tokens, round {self.round + 1}"

    @property
    def file(self) -> str:
        return f"{self.mode}_seq{self.seq_length}_result.json"

    def key(self, settings: GridSettings, world_size: int, device: str, torch_version: str) -> str:
        """Returns the key that identifies it when a run is resumed."""
        common = recorded(settings)
        place = {"world_size": world_size, "device": device, "torch": torch_version}
        return cell_key({**asdict(self), **common, **place})


def recorded(settings: GridSettings) -> dict:
    """Returns the settings that a result records: no timeout, RARE ones only if not the default."""
    found = asdict(settings)
    del found["timeout_s"]
    return {n: value for n, value in found.items() if n not in RARE or value != RARE[n]}


def ran_as(mode: str, device_type: str) -> str:
    """Returns the mode that runs on this device.

    A flash mode without kernels runs as its reference mode; the weights are float32.
    """
    if not mode.startswith("flash"):
        return mode
    import torch

    from dp_clipping.kernels.launch.tiles import (
        available,  # here: it takes seconds that no_dp can spare
    )
    from dp_clipping.modes import REFERENCE_MODE

    if available(torch.device(device_type), torch.float32):
        return mode
    return f"{REFERENCE_MODE[MODES[mode]]}_fsdp"


# ---- one result ----------------------------------------------------------------------------------


def single_result(
    cell: GridCell,
    settings: GridSettings,
    hardware: Hardware,
    world_size: int,
    *,
    status: str,
    reason: str | None = None,
    step_ms: Sequence[float] = (),
    forward_backward_ms: Sequence[float] = (),
    peak_bytes: float | None = None,
    vocab_size: int | None = None,
    parameters: int | None = None,
    trained_parameters: int | None = None,
    environment: dict | None = None,
    profile: dict | None = None,
) -> dict:
    """Returns the result of one round.

    Times are in milliseconds, `_mb` in MiB, `_gb` in GiB; `ran_as`: see there.
    """
    config = recorded(settings)
    del config["batch_size"]
    one = {
        "round": cell.round, "status": status, "reason": reason, "step_ms": list(step_ms),
        "forward_backward_ms": list(forward_backward_ms),
        "peak_memory_mb": None if peak_bytes is None else peak_bytes / MIB,
    }  # fmt: skip
    on_gpu = hardware.device_type == "cuda"
    return merge([
        {
            "mode": cell.mode, "ran_as": ran_as(cell.mode, hardware.device_type),
            "seq_length": cell.seq_length, "batch_size": settings.batch_size,
            "total_batch_size": settings.batch_size * world_size,
            "num_gpus": world_size if on_gpu else 0, "num_processes": world_size,
            "backend": hardware.backend, "device_type": hardware.device_type,
            "config": {
                **config, "vocab_size": vocab_size, "parameters": parameters,
                "trained_parameters": trained_parameters,
            },
            "schema_version": SCHEMA_VERSION, "environment": environment, "profile": profile,
            "rounds": [one],
        }
    ])  # fmt: skip


def merge(results: Sequence[dict]) -> dict:
    """Merges rounds of the same mode and length into one result over all their steps.

    It is `ok` if a round is; `rounds` says how each went.
    """
    rounds = sorted((r for result in results for r in result["rounds"]), key=lambda r: r["round"])
    good = [r for r in rounds if r["status"] == OK]
    last = next((r for r in reversed(results) if r["rounds"][-1]["status"] == OK), results[-1])
    failed = None if good else rounds[-1]
    steps = [x for r in good for x in r["step_ms"]]
    parts = [x for r in good for x in r["forward_backward_ms"]]
    rest = [a - b for a, b in zip(steps, parts, strict=True)]
    peaks = [r["peak_memory_mb"] for r in good if r["peak_memory_mb"] is not None]
    peak = max(peaks, default=None)
    phases = {"forward_backward_ms": parts, "optimizer_step_ms": rest}
    spread = summarize(steps) if steps else None
    return {
        **last,
        "status": OK if good else failed["status"],
        "reason": None if good else failed["reason"],
        "peak_memory_mb": peak,
        "peak_memory_gb": None if peak is None else peak / 1024,
        "avg_time_ms": sum(steps) / len(steps) if steps else None,
        "median_time_ms": spread and spread.median,
        "p10_time_ms": spread and spread.p10,
        "p90_time_ms": spread and spread.p90,
        "phases": {name: summarize(x).median if x else None for name, x in phases.items()},
        "rounds": rounds,
    }


def differs(settings: GridSettings, world_size: int, result: dict) -> str:
    """Says in which settings a result is of another experiment; empty if in none."""
    wanted = {**RARE, **recorded(settings), "num_processes": world_size}
    found = {**RARE, **result, **result["config"]}
    others = [
        f"{name} {found.get(name)}, not {value}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    return ", ".join(others)


def read_results(folder: Path) -> list[dict]:
    """Reads the result files of a folder, sorted by length and mode.

    Raises:
        ValueError: there are none, or one is not of this program.
    """
    found = []
    for path in sorted(folder.glob("*_seq*_result.json")):
        try:
            result = json.loads(path.read_text())
            if result["schema_version"] != SCHEMA_VERSION or result["mode"] not in MODES:
                raise ValueError
            result["rounds"], result["seq_length"], result["config"]["model_name"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}: not a result of this program; remove it, or name another folder"
            ) from None
        found.append(result)
    if not found:
        raise ValueError(f"{folder}: no result there (MODE_seqT_result.json)")
    order = list(MODES)
    return sorted(found, key=lambda r: (r["seq_length"], order.index(r["mode"])))


# ---- what is compared ----------------------------------------------------------------------------


def good_rounds(result: dict) -> dict[int, dict]:
    return {r["round"]: r for r in result["rounds"] if r["status"] == OK}


def time_ratio(result: dict, baseline: dict | None, key: str = "step_ms") -> Ratio | None:
    """Returns the ratio to the baseline's times, over the rounds that both have."""
    if baseline is None:
        return None
    own, base = good_rounds(result), good_rounds(baseline)
    both = sorted(own.keys() & base.keys())
    return ratio([own[r][key] for r in both], [base[r][key] for r in both]) if both else None


def memory_ratio(result: dict, baseline: dict | None) -> float | None:
    if baseline is None or not (result["peak_memory_mb"] and baseline["peak_memory_mb"]):
        return None
    return result["peak_memory_mb"] / baseline["peak_memory_mb"]


def baseline_of(results: Sequence[dict], seq_length: int) -> dict | None:
    """Returns the measured `no_dp` of that length."""
    for r in results:
        if (r["mode"], r["seq_length"], r["status"]) == (BASELINE, seq_length, OK):
            return r
    return None


def lengths_of(results: Sequence[dict]) -> list[int]:
    return sorted({r["seq_length"] for r in results})


def describe_run(results: Sequence[dict]) -> str:
    """Describes a run in one line: model, batch, devices, versions, date."""
    first = next((r for r in results if r["status"] == OK), results[0])
    config, place = first["config"], first["environment"] or {}
    gpus = [gpu["name"] for gpu in place.get("gpus") or []]
    count = first["num_processes"]
    processes = counted(count, "process", "processes")
    where = f"{count} x {gpus[0]}" if gpus and first["num_gpus"] else f"{processes} on CPU"
    parts = [
        config["model_name"], f"batch {first['batch_size']} per rank", where,
        f"clipping {config['clipping']}",
        "embedding trained" if config["train_embedding"] else "embedding frozen",
        f"torch {place.get('torch', '?')}", str(place.get("date", "?"))[:10],
    ]  # fmt: skip
    parts += [
        f"{mode} ran as {reference}" for mode, reference in modes_run_as_others(results).items()
    ]
    return ", ".join(parts)


def modes_run_as_others(results: Sequence[dict]) -> dict[str, str]:
    """Returns mode -> reference mode, for the modes that ran as their reference mode."""
    pairs = ((r["mode"], r.get("ran_as", r["mode"])) for r in results)
    return {mode: reference for mode, reference in pairs if reference != mode}


# ---- summary.txt ---------------------------------------------------------------------------------


def summarize_run(results: Sequence[dict]) -> str:
    """Formats one table per sequence length, growth with the length, and the columns' meanings."""
    lines = [f"Private training under FSDP2: {describe_run(results)}", ""]
    rows = []
    for length in lengths_of(results):
        own = [r for r in results if r["seq_length"] == length]
        table = [_row(r, baseline_of(results, length)) for r in own]
        rows += table
        lines += [format_table(_columns(), table, title=f"{length} tokens per sample"), ""]
    growths = growths_of(r for r in rows if r["status"] == OK)
    lines += [
        f"{mode}: step time grows with the length as {growth}"
        for (_, mode), growth in growths.items()
    ]
    lines += ["the exponents' 95 % intervals are wide where lengths are few"] if growths else []
    return "\n".join([*lines, *([""] if growths else []), *_legend(results), ""])


def _row(result: dict, base: dict | None) -> dict:
    row = {
        "mode": result["mode"], "status": result["status"], "reason": result["reason"],
        "variant": result["mode"], "row": f"{result['batch_size']}x{result['seq_length']}",
    }  # fmt: skip
    if result["status"] != OK:
        return row
    base = None if result is base else base
    whole = time_ratio(result, base)
    part = time_ratio(result, base, "forward_backward_ms")
    steps = f"{len(good_rounds(result))} of {len(result['rounds'])}"
    return row | {
        "step ms": result["median_time_ms"], "p10": result["p10_time_ms"],
        "p90": result["p90_time_ms"], "ratio": whole and whole.value, "low": whole and whole.low,
        "high": whole and whole.high, "fw+bw ms": result["phases"]["forward_backward_ms"],
        "fw+bw ratio": part and part.value, "optimizer ms": result["phases"]["optimizer_step_ms"],
        "tokens/s": 1e3 * result["total_batch_size"] * result["seq_length"]
        / result["median_time_ms"],
        "peak GiB": result["peak_memory_gb"], "peak ratio": memory_ratio(result, base),
        "rounds": steps,
    }  # fmt: skip


def _columns() -> list[Column | str]:
    times = [Column(key, format=".1f", right=True) for key in ("step ms", "p10", "p90")]
    ratios = [Column(key, format=".3f", right=True) for key in ("ratio", "low", "high")]
    return [
        "mode", *times, *ratios, Column("fw+bw ms", format=".1f", right=True),
        Column("fw+bw ratio", format=".3f", right=True),
        Column("optimizer ms", format=".1f", right=True),
        Column("tokens/s", format=",.0f", right=True), Column("peak GiB", format=".2f", right=True),
        Column("peak ratio", format=".3f", right=True), Column("rounds", right=True),
    ]  # fmt: skip


def _legend(results: Sequence[dict]) -> list[str]:
    memory = (
        "allocated on the GPU"
        if any(r["num_gpus"] for r in results)
        else "resident, with Python and all libraries"
    )
    references = [
        f"{mode} ran as {reference}" for mode, reference in modes_run_as_others(results).items()
    ]
    said = (
        [f"{', '.join(references)}, in plain PyTorch: there were no fused kernels."]
        if references
        else []
    )
    return [
        *said,
        "step ms: median of a complete step, of the slowest rank; p10 and p90: its spread.",
        f"ratio: to {BASELINE} of the same rounds, with its 95 % bootstrap interval low to high; "
        "of one round the interval says nothing about another.",
        "fw+bw: forward and backward, clipping and the exchange of sums included.",
        "optimizer ms: the rest of the step: noise and AdamW.",
        f"peak: memory of the largest rank after warm-up, {memory}.",
        "Batches of fixed size on random tokens: no epsilon is stated.",
    ]
