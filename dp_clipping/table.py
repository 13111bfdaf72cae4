"""Formats aligned text tables."""

from collections.abc import Sequence

GAP = "  "


class Remark(str):
    """The last cell of a row, which runs on to the right and widens no column."""


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool], rule: bool = True) -> list[str]:
    """Returns the lines of a table: headings, a rule, one line per further row.

    Args:
        rows: the headings, then the cells of each row; a row may end early, with a `Remark`.
        right: per column, whether its cells are aligned right.
        rule: whether the first row is headings, with a rule below.
    """
    widths = [0] * len(rows[0])
    for row in rows:
        for i, cell in enumerate(row):
            if not isinstance(cell, Remark):
                widths[i] = max(widths[i], len(cell))
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if is_right and not isinstance(cell, Remark) else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=False)
        ]
        lines.append(GAP.join([*cells, *row[len(widths) :]]).rstrip())
    return [lines[0], GAP.join("-" * width for width in widths), *lines[1:]] if rule else lines
