"""The predicted memory of a run, for `--dry-run`."""

import torch

from bench.settings import Settings
from lm.memory import KINDS, MIB, VARIANTS, largest_model, predict_memory, total_parameters
from measure import Column, format_table


def describe_memory(settings: Settings, world_size: int, device_type: str) -> list[str]:
    """Returns a table of each variant's predicted peak by kind; empty if none of them is known.

    With GPUs it also names the deepest model of these widths that fits one of them.
    """
    on_gpu = device_type == "cuda"
    capacity = torch.cuda.get_device_properties(0).total_memory if on_gpu else None
    run = {
        "ranks": world_size, "batch_size": settings.batch_size, "dtype": settings.dtype,
        "bucket_size_mb": settings.bucket_size_mb, "fused_norm": on_gpu,
    }  # fmt: skip
    rows = []
    for name in [name for name in settings.implementations if name in VARIANTS]:
        kinds = predict_memory(name, settings.model, **run)
        row = {kind: size / MIB for kind, size in kinds.items()}
        rows.append({"name": name, **row, "peak": sum(row.values())})
        if capacity:
            rows[-1]["largest"] = _largest(name, settings, capacity, run)
    columns = [Column("name", "implementation"), *(Column(kind, None, ",.1f") for kind in KINDS),
               Column("peak", None, ",.1f")]  # fmt: skip
    if capacity:
        columns.append(Column("largest", "largest that fits", right=True))
    title = f"predicted memory at the peak of a step on {world_size} ranks, MiB per rank"
    return ["", format_table(columns, rows, title)] if rows else []


def _largest(name: str, settings: Settings, capacity: int, run: dict) -> str:
    try:
        found = largest_model(name, settings.model, capacity, **run)
    except ValueError:
        return "not one block"
    return f"{found.num_layers} blocks, {total_parameters(found) / 1e9:.2f} B parameters"
