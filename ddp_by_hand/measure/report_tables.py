"""Columns and rows of a report's tables: times and ratios, memory and exchange, failures."""

import re
import textwrap
from collections.abc import Callable, Sequence

from ddp_by_hand.measure.growth import MIN_LENGTHS, Growth, fit_growth
from ddp_by_hand.measure.results import OK
from ddp_by_hand.measure.runs import (
    BASELINES,
    NAMES,
    SECTION,
    STEP,
    Cell,
    beside,
    memory_beside,
    ratio_beside,
    varying,
)
from ddp_by_hand.measure.statistics import Ratio, summarize
from ddp_by_hand.measure.table import Column, format_table

Table = tuple[list[Column], list[dict]]
_MIB = 1 << 20
TIMES_LEGEND = (
    "Median, 10th and 90th percentile of all timed steps, of the slowest rank of each; warm-up is "
    "not timed."
)
RATIOS_LEGEND = (
    "×: ratio of medians, over the rounds that both have; below 1 is faster. [95 %]: its bootstrap "
    "interval; one that holds 1 shows no difference."
)
PARTS_LEGEND = "Parts of a step, timed separately."
PEAK_LEGEND = (
    "Peak of the largest rank and round: on a GPU what PyTorch has allocated, on a CPU the "
    "process's resident memory, Python and libraries included."
)
EXCHANGE_LEGEND = (
    "Collectives that a step starts, bytes of gradients and gathered parameters handed to them."
)
ERROR_LEGEND = (
    "Gradient error: the largest relative one of a float32 gradient, against one process on the "
    "whole batch."
)


def baselines(cells: Sequence[Cell]) -> list[tuple[str, str, str]]:
    """Returns (name, value, heading) of each baseline that at least one of the cells has."""
    first = next(name for name in NAMES if any(name in cell.names for cell in cells))
    return [
        (name, value, value if name == first else f"{name} {value}")
        for name, values in BASELINES.items()
        for value in values
        if any(beside(cells, cell, name, value) for cell in cells)
    ]


def time_legend(cells: Sequence[Cell]) -> str:
    """Returns the legend of the columns of `time_table`, at any length."""
    return f"{TIMES_LEGEND} {RATIOS_LEGEND}" if baselines(cells) else TIMES_LEGEND


def time_table(cells: Sequence[Cell]) -> Table:
    """Returns the times of complete steps."""
    against = baselines(cells)
    floor = against[0][2] if against and against[0][1] == BASELINES[against[0][0]][0] else None
    over = [] if floor is None else [Column("over", f"over {floor}, ms", milliseconds, right=True)]
    columns = [
        *name_columns(cells), *_spread(),
        *(Column(heading, f"× {heading} [95\u00a0%]", right=True) for _, _, heading in against),
        *over,
        Column("tokens/s", format=",.0f", right=True), Column("steps", right=True),
        Column("rounds", right=True),
    ]  # fmt: skip
    rows = []
    for cell in cells:
        row = _times(cells, cell, STEP)
        if "median" in row:
            tokens = cell.tokens_per_step
            row["tokens/s"] = None if tokens is None else tokens / row["median"] * 1e3
            row["rounds"] = f"{len(cell.good_rounds)} of {len(cell.rounds)}"
            other = beside(cells, cell, *against[0][:2]) if over else None
            if other is not None:
                row["over"] = row["median"] - summarize(other.samples()).median
        rows.append(row)
    return columns, rows


def part_table(cells: Sequence[Cell]) -> Table:
    """Returns the times of parts of a step, at all lengths; no rows if none were timed."""
    rows = []
    for cell in cells:
        for metric in cell.metrics:
            if metric != STEP:
                rows.append({**_times(cells, cell, metric), "part": _part(metric)})
    against = [Column(h, f"× {h} [95\u00a0%]", right=True) for _, _, h in baselines(cells)]
    lengths = {cell.names.get(SECTION) for cell in cells}
    length = [Column(SECTION, "tokens", ",d", right=True)] if len(lengths) > 1 else []
    return [*name_columns(cells), *length, Column("part"), *_spread(), *against], rows


def wide_table(cells: Sequence[Cell], more: Callable[[Cell], dict] | None = None) -> Table:
    """Returns times, their parts and memory, one line a cell: the table that programs print.

    `more` returns further entries of a cell's line: heading -> number or text.
    """
    columns, rows = time_table(cells)
    columns = [column for column in columns if column.key not in ("over", "steps")]
    if len({cell.names.get(SECTION) for cell in cells}) > 1:
        columns.insert(0, Column(SECTION, "tokens", str, right=False))
    (*_, heading), *_ = [*baselines(cells), ("", "", "")]
    for metric in dict.fromkeys(m for cell in cells for m in cell.metrics if m != STEP):
        part = _part(metric)
        columns += [Column(metric, f"{part} ms", milliseconds, right=True)]
        columns += [Column(f"{metric} ×", f"{part} × {heading}", right=True)] if heading else []
        for row, cell in zip(rows, cells, strict=True):
            times = _times(cells, cell, metric)
            row |= {metric: times.get("median"), f"{metric} ×": times.get(heading)}
    of_memory, peaks = memory_table(cells)
    columns += [column for column in of_memory if column not in columns]
    rows = [{**peak, **row} for row, peak in zip(rows, peaks or rows, strict=True)]
    if more is not None:
        found = [more(cell) for cell in cells]
        columns += [Column(key, right=True) for key in dict.fromkeys(k for f in found for k in f)]
        rows = [row | own for row, own in zip(rows, found, strict=True)]
    known = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    return known, rows


def wide_legend(cells: Sequence[Cell]) -> str:
    """Returns the legend of the columns of `wide_table`."""
    parts = [PARTS_LEGEND] if any(len(cell.metrics) > 1 for cell in cells) else []
    return " ".join([time_legend(cells), *parts, memory_legend(cells)])


def wide_report(
    cells: Sequence[Cell], more: Callable[[Cell], dict] | None = None, legend: str = ""
) -> str:
    """Formats the wide table, how times grow with the length, and what the columns mean.

    `more` is as for `wide_table`; `legend` explains what it adds.
    """
    growths = [
        f"B = {batch}, {variant}: step time grows as {growth} (95 % interval)"
        for (batch, variant), growth in growths_of(cells).items()
    ]
    words = textwrap.wrap(f"{wide_legend(cells)} {legend}", 100)
    return "\n".join([format_table(*wide_table(cells, more)), *growths, "", *words])


def growths_of(cells: Sequence[Cell]) -> dict[tuple[int, str], Growth]:
    """Returns (batch size, variant) -> growth of step time, where lengths suffice for an interval.

    A row such as `4x1024` has the sizes of a cell without a length of its own.
    """
    points: dict[tuple[int, str], dict[int, float]] = {}
    for cell in cells:
        sizes = re.fullmatch(r"(\d+)x(\d+)", str(cell.names.get("row")))
        batch, tokens = sizes.groups() if sizes else (
            cell.settings.get("batch_size"), cell.names.get(SECTION)
        )  # fmt: skip
        if cell.status == OK and tokens is not None:
            variant = cell.names.get("variant", cell.names.get("mode"))
            own = points.setdefault((int(batch), variant), {})
            own[int(tokens)] = summarize(cell.samples()).median
    return {
        key: fit_growth(list(own), list(own.values()))
        for key, own in points.items()
        if len(own) >= MIN_LENGTHS
    }


def _part(metric: str) -> str:
    return metric.removesuffix("_ms").replace("_", " ")


def _spread() -> list[Column]:
    return [Column(key, f"{key} ms", milliseconds, right=True) for key in ("median", "p10", "p90")]


def _times(cells: Sequence[Cell], cell: Cell, metric: str) -> dict:
    row = _row(cell)
    if cell.status != OK or not cell.samples(metric):
        return row
    found = summarize(cell.samples(metric))
    row |= {"median": found.median, "p10": found.p10, "p90": found.p90, "steps": found.n}
    for name, value, heading in baselines(cells):
        row[heading] = _interval(ratio_beside(cell, beside(cells, cell, name, value), metric))
    return row


def memory_heading(cells: Sequence[Cell]) -> str:
    """Returns the heading of `memory_table`."""
    return "Memory and exchange" if _has_exchange(cells) else "Memory"


def calls(value: float) -> str:
    """Returns a number of collectives, which is a mean where not every step has them."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def memory_legend(cells: Sequence[Cell]) -> str:
    """Returns the legend of the columns of `memory_table`."""
    known = [
        (PEAK_LEGEND, any(cell.peak_memory_mb is not None for cell in cells)),
        (EXCHANGE_LEGEND, _has_exchange(cells)),
        (ERROR_LEGEND, any(cell.gradient_error is not None for cell in cells)),
    ]
    return " ".join(text for text, is_known in known if is_known)


def _has_exchange(cells: Sequence[Cell]) -> bool:
    return any(
        cell.facts.get(key) is not None for cell in cells for key in ("collectives", "bytes")
    )


def memory_table(cells: Sequence[Cell]) -> Table:
    """Returns memory, collectives and gradient errors; omits columns that no cell has."""
    against, rows = baselines(cells), []
    for cell in cells:
        row = _row(cell) | {key: cell.facts.get(key) for key in ("collectives", "bytes")}
        row |= {"peak": cell.peak_memory_mb, "error": _error(cell)}
        for name, value, heading in against:
            row[f"peak {heading}"] = memory_beside(cell, beside(cells, cell, name, value))
        rows.append(row)
    columns = [
        Column("peak", "peak MiB", ",.0f", right=True),
        *(Column(f"peak {h}", f"× {h}", ".3f", right=True) for _, _, h in against),
        Column("collectives", "collectives per step", calls, right=True),
        Column("bytes", "MiB sent per step", lambda count: f"{count / _MIB:,.1f}", right=True),
        Column("error", "gradient error", right=True),
    ]
    known = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    return [*name_columns(cells), *known], rows if known else []


def failure_table(cells: Sequence[Cell]) -> Table:
    """Returns a row for each attempt that failed, also of cells of which others went well."""
    rows = [
        {**_row(cell), "status": OK, "reason": one.reason, "failed": one.status,
         "round": "proof" if one is cell.gate else one.number + 1}
        for cell in cells for one in cell.failures
    ]  # fmt: skip
    length = [SECTION] if any(SECTION in cell.names for cell in cells) else []
    rest = [
        Column(key, key.replace("_", " "), str, right=False)
        for key in (*length, "round", "failed", "reason")
    ]
    return [*name_columns(cells), *rest], rows


def name_columns(cells: Sequence[Cell]) -> list[Column]:
    """Returns the columns that tell rows apart, without the length of the samples."""
    names = [n for n in NAMES if n != SECTION and any(n in cell.names for cell in cells)]
    shown = [n for n in names if n == names[0] or {c.names.get(n) for c in cells} != {"none"}]
    shown += ["ran_as"] if any(ran_as(cell) for cell in cells) else []
    return [
        Column(key, key.replace("_", " "), str, right=False) for key in (*shown, *varying(cells))
    ]


def ran_as(cell: Cell) -> str | None:
    """Returns the mode that the cell ran as, if that is not the mode it is called."""
    found = cell.facts.get("ran_as")
    return None if found == cell.names.get("mode") else found


def say_ran_as(cells: Sequence[Cell]) -> list[str]:
    """Says of each mode that ran as another which that was: `flash_fsdp ran as ghost_fsdp`."""
    pairs = dict.fromkeys((cell.names["mode"], ran_as(cell)) for cell in cells if ran_as(cell))
    return [f"{mode} ran as {reference}" for mode, reference in pairs]


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _row(cell: Cell) -> dict:
    return {
        **cell.settings, **cell.names, "ran_as": ran_as(cell), "status": cell.status,
        "reason": cell.reason,
    }  # fmt: skip


def _error(cell: Cell) -> str | None:
    if cell.gradient_error is None:
        return None
    return f"{cell.gradient_error:.1e}" + (" WRONG" if cell.is_wrong else "")


def _interval(found: Ratio | None) -> str | None:
    return found and str(found).replace(", ", ",\u00a0")
