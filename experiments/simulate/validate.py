"""Compares predictions with results of `benchmark_ddp.py`, also of shapes that were not traced."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments.simulate.calibrate import Calibration
from experiments.simulate.step import simulate
from lm.memory import VARIANTS
from lm.shape import Shape
from measure import OK, Column, Results, format_table


def measured_steps(folders: Sequence[Path], shape: Shape | None = None) -> dict[str, float]:
    """Returns variant -> seconds of a step: the median of its fastest round.

    Other programs on the machine only ever slow a round down.
    """
    found: dict[str, float] = {}
    for row in (row for folder in folders for row in Results(folder).rows()):
        if row["kind"] == "timing" and row["status"] == OK and shape in (None, shape_of(row)):
            step = median(row["step_ms"]) / 1e3
            found[row["implementation"]] = min(step, found.get(row["implementation"], step))
    if "none" not in found:
        raise ValueError(f"{folders[0]}: has no result of none at these sizes; measure it too")
    return found


def shape_of(row: dict) -> Shape:
    return Shape.of(row["config"])


def validation(found: Calibration, folder: Path) -> str:
    """Compares with results: the whole step, and what it is relative to `none`."""
    rows = [row for row in Results(folder).rows() if row["kind"] == "timing"]
    if not rows:
        raise ValueError(f"{folder}: holds no results of the benchmark")
    shape, ranks = shape_of(rows[0]), rows[0]["config"]["world_size"]
    steps = measured_steps([folder])
    table_rows = []
    for name, step in steps.items():
        if name not in VARIANTS:
            continue
        predicted = simulate(found, name, shape, ranks).step
        ratio = predicted / simulate(found, "none", shape, ranks).step
        table_rows.append({
            "name": name, "measured": step * 1e3, "predicted": predicted * 1e3,
            "error": predicted / step - 1, "ratio": step / steps["none"], "expected": ratio,
            "off": ratio / (step / steps["none"]) - 1,
        })  # fmt: skip
    columns = [
        Column("name", "variant"), Column("measured", "measured ms", ".2f"),
        Column("predicted", "predicted ms", ".2f"), Column("error", None, "+.1%"),
        Column("ratio", "x none", ".3f"), Column("expected", "predicted", ".3f"),
        Column("off", "error", "+.1%"),
    ]  # fmt: skip
    return format_table(columns, table_rows, f"{folder}: {ranks} ranks, {shape}")
