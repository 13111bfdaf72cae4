"""A report's table of phases: where a step's time goes, by length of the samples.

Of cells that have `phases_ms`, a phase's milliseconds each, as `experiments.profile_bottlenecks`
measures them.
"""

from collections.abc import Sequence

from ddp_by_hand.measure.growth import fit_growth
from ddp_by_hand.measure.report_tables import Table, milliseconds
from ddp_by_hand.measure.results import OK
from ddp_by_hand.measure.runs import SECTION, Cell
from ddp_by_hand.measure.table import Column

PHASES_LEGEND = (
    "Medians in milliseconds on rank 0, with profiling on; their sum may exceed the step time, "
    "which is of steps without it. Share: of the sum, at the longest length. Grows as: the power "
    "of the tokens T that fits all lengths, with its 95 % interval from three lengths "
    "on. Phases are not covered by epsilon."
)
SUM = "sum of phases"


def phase_tables(cells: Sequence[Cell]) -> list[tuple[str, Table]]:
    """Returns (name, table) pairs: one table for all lengths of the same mode and settings."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.status == OK and SECTION in cell.names and cell.facts.get("phases_ms"):
            name = ", ".join(str(v) for k, v in cell.names.items() if k != SECTION)
            groups.setdefault((name, str(sorted(cell.settings.items()))), []).append(cell)
    return [(name, _table(own)) for (name, _), own in groups.items()]


def _table(cells: Sequence[Cell]) -> Table:
    cells = sorted(cells, key=lambda cell: cell.names[SECTION])
    lengths = [cell.names[SECTION] for cell in cells]
    times = [cell.facts["phases_ms"] for cell in cells]
    times = [{**one, SUM: sum(one.values())} for one in times]
    last = times[-1]
    rows = []
    for phase in dict.fromkeys(name for one in reversed(times) for name in one if name != SUM):
        rows.append(_row(phase, lengths, times, last[SUM]))
    rows.append(_row(SUM, lengths, times, last[SUM]))
    columns = [
        Column("phase"),
        *(Column(str(n), f"{n:,} tokens, ms", milliseconds, right=True) for n in lengths),
        Column("share", f"share at {lengths[-1]:,}", ".1%", right=True),
        Column("growth", "grows as [95\u00a0%]"),
    ]
    return columns, rows


def _row(phase: str, lengths: Sequence[int], times: Sequence[dict], whole: float) -> dict:
    row = {"phase": phase} | {str(n): t.get(phase) for n, t in zip(lengths, times, strict=True)}
    if phase in times[-1]:
        row["share"] = times[-1][phase] / whole
    if all(phase in one for one in times):
        growth = fit_growth(lengths, [one[phase] for one in times])
        row["growth"] = None if growth is None else str(growth)
    return row
