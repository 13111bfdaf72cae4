"""The tables: scores over seeds beside what was published, and what was tried."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ddp_by_hand.experiments.records.rows import ROWS, STDLIB
from ddp_by_hand.measure import OK, Column, format_table
from ddp_by_hand.measure.report_tables import wide_report
from ddp_by_hand.measure.runs import Cell, cells_of

TRIED = ("batches", "epochs", "rate", "clip", "groups", "decay", "sampling", "views")
LEGEND = (
    "score: accuracy on test images, or loss on held-out text, mean ± standard deviation over "
    "seeds. p: of a t-test (one "
    "sample, two sides) of no difference from the published figure. s: of one run, its data on the "
    "device. ε by privacy loss distributions, at δ below 1/n."
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
        found = [one["score"] for one in own]
        told = "none" if figure is None else f"{figure:g}"
        return {
            "score": spread(found, row.unit),
            "published": f"predicted {own[0]['predicted']:.3f}" if "predicted" in own[0] else told,
            "p": "" if figure is None else p_value(found, figure),
            "ε": f"{max(one['epsilon'] for one in own):.3f}",
            "s": f"{statistics.median(one['seconds'] for one in own):.1f}",
            "paper": row.source,
        }

    return wide_report(cells, more, LEGEND)


def spread(scores: Sequence[float], unit: str) -> str:
    """Returns mean ± standard deviation."""
    form = ".2f" if unit == "%" else ".3f"
    deviation = f" ± {statistics.stdev(scores):{form}}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):{form}}{deviation} {unit}"


def p_value(scores: Sequence[float], figure: float) -> str:
    """Returns the probability, if the true mean were the figure, of a mean as far from it."""
    from scipy.stats import ttest_1samp

    return f"{ttest_1samp(scores, figure).pvalue:.3f}" if len(set(scores)) > 1 else ""


def tuning_table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats what was tried: the best of each row first."""
    found = [
        {**one["settings"], "row": one["row"], "status": one["status"],
         "reason": one.get("reason"), "score": one.get("score")}
        for one in rows
    ]  # fmt: skip
    order = list(dict.fromkeys(one["row"] for one in found))
    found.sort(key=lambda one: (order.index(one["row"]), best_first(one)))
    columns = ["row", *TRIED, Column("score", "held out", ".4g")]
    return format_table(columns, found)


def best_first(tried: dict[str, Any]) -> float:
    """Returns what sorts the best first: accuracies fall, losses rise."""
    if tried["score"] is None:  # it failed
        return math.inf
    return tried["score"] if tried.get("data", STDLIB) == STDLIB else -tried["score"]
