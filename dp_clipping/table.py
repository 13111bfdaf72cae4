"""Aligned text tables."""

from collections.abc import Sequence

GAP = "  "


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Returns the lines of a table: headings, a rule, one line per further row.

    Args:
        rows: the headings, then the cells of each row. In a row that is shorter than the headings
            the last cell is a remark: it runs on to the right and widens no column.
        right: per column, whether its cells are aligned right.
    """
    count = len(rows[0])
    counted = [row if len(row) == count else row[:-1] for row in rows]
    widths = [max(len(row[i]) for row in counted if i < len(row)) for i in range(count)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=False)
        ]
        if len(row) < count:
            cells[-1] = row[-1]
        lines.append(GAP.join(cells).rstrip())
    return [lines[0], GAP.join("-" * width for width in widths), *lines[1:]]
