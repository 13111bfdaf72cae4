"""The tables: scores over seeds beside what was published, and what was tried."""

import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from ddp_by_hand.experiments.records.rows import ROWS
from ddp_by_hand.measure import OK, Column, format_table
from ddp_by_hand.measure.report_tables import wide_legend, wide_table
from ddp_by_hand.measure.runs import Cell, cells_of

TRIED = ("batches", "epochs", "rate", "clip", "groups", "decay", "sampling", "views")
LEGEND = (
    "%: accuracy on the test images, mean ± standard deviation over seeds. p: of a t-test (one "
    "sample, two sides) of no difference from the published figure. s: of one run, its data on the "
    "device. ε by privacy loss distributions, at δ = 1e-5."
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats the records: a line for each row and engine."""
    cells = cells_of(rows)
    scores = {key: [one for one in rows if key == (one["row"], one["variant"])]
              for key in {(one["row"], one["variant"]) for one in rows}}  # fmt: skip
    published = {row.name: row for row in ROWS}

    def more(cell: Cell) -> dict[str, Any]:
        key = (cell.names["row"], cell.names["variant"])
        own = [one for one in scores[key] if one["status"] == OK]
        row = published.get(key[0])
        if not own or row is None:
            return {}
        figure = row.published
        return {
            "%": spread([one["accuracy"] for one in own]),
            "published": "none" if figure is None else f"{figure:g}",
            "p": "" if figure is None else p_value([one["accuracy"] for one in own], figure),
            "ε": f"{max(one['epsilon'] for one in own):.3f}",
            "s": f"{statistics.median(one['seconds'] for one in own):.1f}",
            "paper": row.source,
        }

    lines = [format_table(*wide_table(cells, more)), ""]
    return "\n".join(lines + textwrap.wrap(f"{LEGEND} {wide_legend(cells)}", 100))


def spread(scores: Sequence[float]) -> str:
    """Returns mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.2f}{deviation}"


def p_value(scores: Sequence[float], figure: float) -> str:
    """Returns the probability, if the true mean were the figure, of a mean as far from it."""
    from scipy.stats import ttest_1samp

    return f"{ttest_1samp(scores, figure).pvalue:.3f}" if len(set(scores)) > 1 else ""


def tuning_table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats what was tried: the best of each row first."""
    found = [
        {**one["settings"], "row": one["row"], "status": one["status"],
         "reason": one.get("reason"), "accuracy": one.get("accuracy")}
        for one in rows
    ]  # fmt: skip
    order = list(dict.fromkeys(one["row"] for one in found))
    found.sort(key=lambda one: (order.index(one["row"]), -(one["accuracy"] or 0)))
    columns = ["row", *TRIED, Column("accuracy", "held out, %", ".2f")]
    return format_table(columns, found)
