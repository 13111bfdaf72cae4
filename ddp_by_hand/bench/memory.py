"""The predicted memory of a run: the table of `--dry-run`, and `memory.png`."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ddp_by_hand.bench.options import NOT_PRIVATE
from ddp_by_hand.bench.settings import Settings
from ddp_by_hand.lm.memory import (
    KINDS,
    MIB,
    VARIANTS,
    largest_model,
    memory_after_backward,
    predict_memory,
    total_parameters,
)
from ddp_by_hand.measure import OK, Column, describe_failure, draw_memory, format_table

COMPILED = "memory is not predicted with --compile, which changes what blocks keep for backward"
MOST_BLOCKS = 1 << 10  # of the largest model that fits; looking for a deeper one takes seconds
AT_THE_PEAK = (
    "kinds at the moment of the peak: no activations if it lies in the optimizer's step, few "
    "gradients if it lies early in backward"
)


def predictions(settings: Settings, world_size: int, on_gpu: bool) -> dict[str, dict[str, float]]:
    """Returns implementation -> kind -> MiB on a rank at the predicted peak of an ordinary step.

    What is not in `lm.memory.VARIANTS` is left out, and everything with `--compile`.
    """
    return {
        name: {kind: size / MIB for kind, size in kinds.items()}
        for name in settings.implementations
        if name in VARIANTS and not settings.compile
        for kinds in [
            predict_memory(name, settings.model, **_run(settings, world_size, on_gpu)),
        ]
    }


def describe_memory(
    settings: Settings, world_size: int, device_type: str, local_ranks: int
) -> list[str]:
    """Returns a table of each variant's predicted peak by kind, and names what is not predicted.

    It also names the deepest model of these widths that fits a GPU, or the memory of this machine,
    which so many ranks share.
    """
    on_gpu = device_type == "cuda"
    capacity = torch.cuda.get_device_properties(0).total_memory if on_gpu else None
    rows = []
    for name, kinds in predictions(settings, world_size, on_gpu).items():
        rows.append({"name": name, **kinds, "peak": sum(kinds.values())})
        if capacity:
            rows[-1]["largest"] = _largest(
                name, settings, capacity, _run(settings, world_size, True)
            )
    if settings.compile:
        return ["", COMPILED]
    others = [name for name in settings.implementations if name not in VARIANTS]
    unknown = ["", f"not predicted, other code decides what is kept: {', '.join(others)}"]
    if not rows:
        return unknown
    columns = [Column("name", "implementation"), *(Column(kind, None, ",.1f") for kind in KINDS),
               Column("peak", None, ",.1f")]  # fmt: skip
    if capacity:
        columns.append(Column("largest", "largest that fits", right=True))
    title = f"predicted memory at the peak of a step on {world_size} ranks, MiB per rank"
    lines = ["", format_table(columns, rows, title), "", AT_THE_PEAK, *(unknown if others else ())]
    names = [row["name"] for row in rows]
    return lines if on_gpu else lines + _largest_on_cpu(settings, names, world_size, local_ranks)


def draw_predicted(
    settings: Settings,
    rows: Sequence[dict],
    world_size: int,
    on_gpu: bool,
    subtitle: str,
    path: Path,
) -> bool:
    """Draws each implementation's predicted memory, and on a GPU the measured peak beside it.

    Args:
        rows: those of the benchmark's table.

    Returns:
        Whether there was something to draw.
    """
    known = predictions(settings, world_size, on_gpu)
    later = {
        name: {kind: size / MIB for kind, size in kinds.items()}
        for name in known
        for kinds in [memory_after_backward(name, settings.model, ranks=world_size,
                                            dtype=settings.dtype)]
    }  # fmt: skip
    shown = [row for row in rows if row["clipping"] == NOT_PRIVATE and row["label"] in known]
    if not shown:
        return False
    notes = [subtitle]
    if not on_gpu:
        notes.append(
            "Predicted only: on a CPU the peak that is measured is the process's memory, with "
            "Python and libraries."
        )
    if missing := sorted({row["name"] for row in rows} - {row["name"] for row in shown}):
        notes.append(f"Left out, since it is not predicted: {', '.join(missing)}.")
    bars = [
        {
            "label": row["name"],
            "kinds": known[row["label"]],
            "later": later[row["label"]],
            "measured": row.get("peak_memory_mb") if on_gpu else None,
            "reason": None if row["status"] == OK else describe_failure(row),
        }
        for row in shown
    ]
    draw_memory(bars, path, "Memory of a rank at the peak of a step, and after backward", notes)
    return True


def _run(settings: Settings, world_size: int, on_gpu: bool) -> dict:
    return {
        "ranks": world_size, "batch_size": settings.batch_size, "dtype": settings.dtype,
        "bucket_size_mb": settings.bucket_size_mb, "on_gpu": on_gpu,
    }  # fmt: skip


def machine_memory() -> int | None:
    """Returns the bytes of memory that processes here may use, or None if that is not known."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()  # of a container
    except OSError:
        limit = "max"
    return min(found, int(limit)) if limit.isdecimal() else found


def _largest_on_cpu(
    settings: Settings, names: Sequence[str], world_size: int, local_ranks: int
) -> list[str]:
    memory = machine_memory()
    if memory is None:
        return ["", "largest that fits: not known, as this system does not tell its memory"]
    run = _run(settings, world_size, False)
    return [
        "",
        f"largest that fits {memory / 2**30:,.1f} GiB, which {local_ranks} ranks here share, "
        "without Python and libraries:",
        *(f"  {name}: {_largest(name, settings, memory // local_ranks, run)}" for name in names),
    ]


def _largest(name: str, settings: Settings, capacity: int, run: dict) -> str:
    try:
        found = largest_model(name, settings.model, capacity, MOST_BLOCKS, **run)
    except ValueError:
        return "not one block"
    least = "at least " if found.num_layers == MOST_BLOCKS else ""
    return f"{least}{found.num_layers} blocks, {total_parameters(found) / 1e9:.2f} B parameters"
