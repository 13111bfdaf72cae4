"""Cells of `experiments.llama_fsdp`, the results of a cell, and the summary of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType

from ddp_by_hand.lm.runtime import Hardware
from ddp_by_hand.measure import OK, SCHEMA_VERSION, cell_key, summarize
from ddp_by_hand.measure.report_tables import milliseconds, say_ran_as, wide_report
from ddp_by_hand.measure.runs import SECTION, SIZES, Cell, cells_of, read_cells
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
PART = "forward_backward_ms"


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
    timeout: float = 600.0
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
    del found["timeout"]
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
    sizes: Mapping[str, int] = MappingProxyType({}),
    environment: dict | None = None,
    profile: dict | None = None,
) -> dict:
    """Returns the result of one round.

    Times are in milliseconds, `_mb` in MiB, `_gb` in GiB; `ran_as`: see there. `sizes` are those of
    the network, as `measure.runs.SIZES` names them.
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
            "config": {**config, **dict.fromkeys(SIZES), **sizes},
            "schema_version": SCHEMA_VERSION, "environment": environment, "profile": profile,
            "rounds": [one],
        }
    ])  # fmt: skip


def merge(results: Sequence[dict]) -> dict:
    """Merges rounds of the same mode and length into one result over all their steps.

    It is `ok` if a round is; `rounds` says how each went.
    """
    rounds = sorted((r for result in results for r in result["rounds"]), key=lambda r: r["round"])
    last = next((r for r in reversed(results) if r["rounds"][-1]["status"] == OK), results[-1])
    (cell,) = cells_of([{**last, "rounds": rounds}])
    steps, parts, peak = cell.samples(), cell.samples(PART), cell.peak_memory_mb
    rest = [a - b for a, b in zip(steps, parts, strict=True)]
    phases = {PART: parts, "optimizer_step_ms": rest}
    spread = summarize(steps) if steps else None
    return {
        **last,
        "status": cell.status,
        "reason": cell.reason,
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


def read_grid(folder: Path) -> list[Cell]:
    """Reads the results of a folder, sorted by length and mode.

    Raises:
        ValueError: there are none, or one is not of this program.
    """
    cells = read_cells(folder)
    if any(mode_of(cell) not in MODES or "model_name" not in cell.settings for cell in cells):
        raise ValueError(f"{folder}: not results of this program; name another folder")
    order = list(MODES)
    return sorted(cells, key=lambda cell: (cell.names[SECTION], order.index(mode_of(cell))))


def mode_of(cell: Cell) -> str:
    return cell.names.get("mode", "")


def good(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.status == OK]


def lengths_of(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.names[SECTION] for cell in cells})


def on_gpu(cell: Cell) -> bool:
    return cell.machine["device_type"] == "cuda"


def describe_run(cells: Sequence[Cell]) -> str:
    """Describes a run in one line: model, batch, devices, versions, date."""
    first = next(iter(good(cells)), cells[0])
    settings, place = first.settings, (*first.environments, {})[0]
    gpus, count = [gpu["name"] for gpu in place.get("gpus") or []], settings["world_size"]
    processes = counted(count, "process", "processes")
    where = f"{count} x {gpus[0]}" if gpus and on_gpu(first) else f"{processes} on CPU"
    return ", ".join([
        settings["model_name"], f"batch {settings['batch_size']} per rank", where,
        f"clipping {settings['clipping']}",
        "embedding trained" if settings["train_embedding"] else "embedding frozen",
        f"torch {place.get('torch', '?')}", str(place.get("date", "?"))[:10],
        *say_ran_as(cells),
    ])  # fmt: skip


def summarize_run(cells: Sequence[Cell]) -> str:
    """Formats a table of all cells, growth with the length, and the columns' meanings."""
    legend = (
        "Forward backward: clipping and the exchange of sums included; noise and AdamW are the "
        "rest. Batches of fixed size on random tokens: no epsilon is stated."
    )
    if references := say_ran_as(cells):
        legend += f" {', '.join(references)}, in plain PyTorch: there were no fused kernels."
    title = f"Private training under FSDP2: {describe_run(cells)}"
    return f"{title}\n\n{wide_report(cells, _rest, legend)}\n"


def _rest(cell: Cell) -> dict[str, str]:
    """Returns the time of noise and AdamW."""
    both = zip(cell.samples(), cell.samples(PART), strict=True)
    rest = [whole - part for whole, part in both]
    return {"noise and AdamW ms": milliseconds(median(rest))} if rest else {}
