"""The report's page: the template `report.html.jinja` with autoescaping, and what it is given.

A page has sections, (heading, blocks), and a block is (kind, content):

| kind | content |
| --- | --- |
| `heading`, `headline`, `note`, `command` | text |
| `list`, `ranking` | lines |
| `facts` | (name, value) pairs, in a table that wraps instead of scrolling |
| `table` | `label`, which screen readers announce, `headings` and `rows`: see `table` |
| `figure` | `name` and the fields of a `Picture` |
| `details` | (title, the preformatted text that it unfolds) |
"""

import base64
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_by_hand.measure.results import UNAVAILABLE
from ddp_by_hand.measure.table import Column, table_cells
from dp_clipping.table import Remark

_TOKEN = "HF_TOKEN"  # of the environment: the one secret that programs here are given
_LIKE_A_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Block = tuple[str, Any]


def page(title: str, subtitle: str, sections: Sequence[tuple[str, Sequence[Block]]]) -> str:
    """Returns the text of the whole file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["anchor"] = lambda heading: re.sub(r"\W+", "-", heading.lower())
    environment.filters["base64"] = lambda data: Markup(base64.b64encode(data).decode())
    template = environment.get_template("report.html.jinja")
    return template.render(title=title, subtitle=subtitle, sections=sections)


def table(columns: Sequence[Column], rows: Sequence[dict], label: str) -> Block:
    """Returns a block of rows as `measure.table` formats them.

    The first cell of a row is its name; the others are (text, CSS class, columns). The reason of a
    failed row spans its numbers' columns.
    """
    headings, body, right = table_cells(columns, rows)
    classes = ["number" if is_right else "text" for is_right in right]
    lines = []
    for row, (name, *cells) in zip(rows, body, strict=True):
        line = []
        for position, cell in enumerate(cells, start=1):
            if isinstance(cell, Remark):
                kind = "faint" if row["status"] == UNAVAILABLE else "bad"
                line.append((cell, kind, len(headings) - position))
            else:
                line.append((cell, classes[position], 1))
        lines.append((name, line))
    content = {"label": label, "headings": list(zip(headings, classes, strict=True)), "rows": lines}
    return "table", content


def _printable(value: object) -> object:
    """Returns text without control characters, terminal colours and access tokens."""
    if hasattr(value, "__html__"):  # a Markup of `base64` above
        return value
    text = _UNPRINTABLE.sub("", str(value))
    token = os.environ.get(_TOKEN)
    if token:
        text = text.replace(token, "***")
    return _LIKE_A_TOKEN.sub("***", text)
