"""Cells of `experiments.llama_fsdp`, the results of a cell, and the summary of all."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from ddp_by_hand.lm.runtime import Hardware
from ddp_by_hand.measure import OK, SCHEMA_VERSION, Ratio, cell_key, format_table, summarize
from ddp_by_hand.measure.report_tables import growths_of, milliseconds, wide_legend, wide_table
from ddp_by_hand.measure.runs import SECTION, Cell, cells_of
from ddp_by_hand.measure.statistics import ratio_of_rounds
from ddp_by_hand.measure.words import counted

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
    learning_rate: float = 1e-5
    sigma: float = 1.0
    max_grad_norm: float = 1.0
    clipping: str = "flat"
    train_embedding: bool = False
    seed: int = 0
    timeout_s: float = 600.0
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
    def place(self) -> tuple[str, int]:
        """Returns what all rounds of the cell have in common."""
        return self.mode, self.seq_length

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
    own, base = ({n: r[key] for n, r in good_rounds(x).items()} for x in (result, baseline))
    return ratio_of_rounds(own, base)


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
    cells = cells_of(results)
    lines = [f"Private training under FSDP2: {describe_run(results)}", ""]
    for length in lengths_of(results):
        own = [cell for cell in cells if cell.names[SECTION] == length]
        table = format_table(*wide_table(own, _rest), title=f"{length} tokens per sample")
        lines += [table, ""]
    growths = [
        f"{mode}: step time grows with the length as {growth}"
        for (_, mode), growth in growths_of(cells).items()
    ]
    if growths:
        lines += [*growths, "the exponents' 95 % intervals are wide where lengths are few", ""]
    if references := modes_run_as_others(results):
        pairs = ", ".join(f"{mode} ran as {reference}" for mode, reference in references.items())
        lines.append(f"{pairs}, in plain PyTorch: there were no fused kernels.")
    legend = (
        f"{wide_legend(cells)} Forward backward: clipping and the exchange of sums included; noise "
        "and AdamW are the rest. Batches of fixed size on random tokens: no epsilon is stated."
    )
    return "\n".join([*lines, *textwrap.wrap(legend, 100), ""])


def _rest(cell: Cell) -> dict[str, str]:
    """Returns the time of noise and AdamW."""
    both = zip(cell.samples(), cell.samples("forward_backward_ms"), strict=True)
    rest = [whole - part for whole, part in both]
    return {"noise and AdamW ms": milliseconds(median(rest))} if rest else {}
