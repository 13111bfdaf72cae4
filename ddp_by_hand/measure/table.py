"""Formats rows as an aligned text table, plain or as Markdown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Number

from ddp_by_hand.measure.results import OK
from dp_clipping.table import Remark, aligned

NO_VALUE = "–"


@dataclass(frozen=True)
class Column:
    """One column: the row's `key`, a `heading` (default: the key) and a `format` for its values.

    `format` is a format specification for numbers such as `".2f"` or `",d"`, or a function from
    value to text. `right` says on which side cells are aligned; None decides by the values:
    numbers right, text left.
    """

    key: str
    heading: str | None = None
    format: str | Callable[[object], str] | None = None
    right: bool | None = None


def format_table(
    columns: Sequence[Column | str],
    rows: Sequence[dict],
    title: str | None = None,
    markdown: bool = False,
) -> str:
    """Returns the table as text without a final line break, never coloured and never wrapped.

    A missing value (absent, None, NaN) prints as `–`. A row whose `status` is there and not `ok`
    shows status and `reason` in place of its numbers: from the first right-aligned column on.
    """
    headings, body, right = table_cells(columns, rows)
    lines = _markdown(headings, body, right) if markdown else aligned([headings, *body], right)
    if title:
        lines = [f"**{title}**" if markdown else title, "", *lines]
    return "\n".join(lines)


def table_cells(
    columns: Sequence[Column | str], rows: Sequence[dict]
) -> tuple[list[str], list[list[str]], list[bool]]:
    """Returns headings, a list of cells for each row, and which columns are aligned right.

    A failed row has fewer cells than there are columns: its last one is status and reason.
    """
    columns = [Column(column) if isinstance(column, str) else column for column in columns]
    right = [_is_right(column, rows) for column in columns]
    first = _first_number(right)
    body = [_cells(columns, row, first) for row in rows]
    headings = [column.key if column.heading is None else column.heading for column in columns]
    return headings, body, right


def describe_failure(row: dict) -> str:
    """Returns `status: reason` on one line, or the empty string for a row that is `ok`."""
    status = row.get("status", OK)
    if status == OK:
        return ""
    reason = " ".join(str(row.get("reason") or "").split())
    return f"{status}: {reason}" if reason else str(status)


def _is_right(column: Column, rows: Sequence[dict]) -> bool:
    """Returns whether a column holds numbers: it has no text, or says so itself."""
    if column.right is not None:
        return column.right
    return not any(isinstance(row.get(column.key), str) for row in rows)


def _first_number(right: list[bool]) -> int:
    """Returns the index of the first number column after the one that names the row."""
    return next((i for i, is_right in enumerate(right) if is_right and i > 0), 1)


def _cells(columns: Sequence[Column], row: dict, first: int) -> list[str]:
    """Returns a row's cells; a failed row has those before its first number and then says why."""
    failure = describe_failure(row)
    shown = columns[:first] if failure else columns
    cells = [_format(row.get(column.key), column.format) for column in shown]
    return [*cells, Remark(failure)] if failure else cells


def _format(value, form: str | Callable[[object], str] | None) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NO_VALUE
    if callable(form):
        return form(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Number):
        default = ".2f" if isinstance(value, float) else ""
        return format(value, form or default)
    return " ".join(str(value).split())


def _markdown(headings: list[str], body: list[list[str]], right: list[bool]) -> list[str]:
    rule = ["---:" if is_right else "---" for is_right in right]
    filled = [cells + [""] * (len(headings) - len(cells)) for cells in body]
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in [headings, *filled]]
    lines = [escaped[0], rule, *escaped[1:]]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
