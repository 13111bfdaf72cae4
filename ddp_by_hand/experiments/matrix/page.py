"""The outcomes of the matrix as a page: a section for each library, replaced when that is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ddp_by_hand.experiments.matrix.trial import CHANGED, FAILED, REFUSED, WORKS, Outcome, Row

INTRODUCTION = """\
# What trains privately

Architectures of four libraries, in tiny configurations and else in their default settings.
This page is written by

```
python -m ddp_by_hand.experiments.matrix --output docs/matrix.md
```

*Works* means that `make_private` takes the model, that
[`engine.check`](verification.md#your-network-and-batch) finds norms and clipped sum of a batch
equal to those of one backward per sample, and that two steps with noise run. *Changed* works after
the change that is named, which the command makes itself. *Refused* is followed by the first
sentence of the message, which goes on with what to do instead. *Failed* is what the library raised,
or a step that is not exact. The loss is the cross-entropy of the outputs, and sequences of tokens
are padded on the right.
"""
FAMILY = re.compile(r"^## (\w+)\n", re.MULTILINE)


def written(page: str, family: str, outcomes: Sequence[Outcome], measured: str) -> str:
    """Returns a page (perhaps empty) with the section of this family anew, in its place."""
    parts = FAMILY.split(page)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    sections[family] = f"\n{measured}\n\n" + "\n".join(_section(*part) for part in _by(outcomes))
    return "\n".join(
        [INTRODUCTION, *(f"## {name}\n{text.rstrip()}\n" for name, text in sections.items())]
    )


def words_of(outcome: Outcome) -> tuple[str, str]:
    """Returns status and words of an outcome as they stand on a page."""
    words = outcome.words
    if outcome.status in (REFUSED, FAILED):
        words = " ".join(words.replace("|", "/").replace("`", "'").split())
        words = re.sub(r"(output \d+ of )\w+Model\b", r"\1the model", words)  # alike in one row
        words = re.sub(r"([*_<>\[\]])", r"\\\1", words)
    return outcome.status, words


def _by(outcomes: Iterable[Outcome]) -> list[tuple[str, list[Outcome]]]:
    sections: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sections.setdefault(outcome.row.section, []).append(outcome)
    return list(sections.items())


def _section(title: str, outcomes: list[Outcome]) -> str:
    """Returns what works as a line of names, and a table of the rest, equal words in one row."""
    works = [outcome.row for outcome in outcomes if outcome.status == WORKS]
    rest: dict[tuple[str, str], list[Row]] = {}
    for outcome in outcomes:
        if outcome.status != WORKS:
            rest.setdefault(words_of(outcome), []).append(outcome.row)
    order = [CHANGED, REFUSED, FAILED]
    lines = [f"### {title}: {len(works)} of {len(outcomes)} work", "", _names(works), ""]
    if rest:
        lines += ["| others | |", "| --- | --- |"]
        for (status, words), rows in sorted(rest.items(), key=lambda one: order.index(one[0][0])):
            lines.append(f"| {_names(rows)} | {status}: {words} |")
        lines.append("")
    return "\n".join(line for n, line in enumerate(lines) if line or lines[n - 1])


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{row.name}`" for row in rows)
