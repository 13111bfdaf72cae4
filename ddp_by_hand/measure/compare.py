#!/usr/bin/env python3
"""Compares two results folders, or files of rows: what has become faster or slower.

    python -m ddp_by_hand.measure.compare results_ddp/before results_ddp/after
    python -m ddp_by_hand.measure.compare old/results.jsonl new/results.jsonl --threshold 0.02
    python -m ddp_by_hand.measure.compare results/a results/b --metric forward_backward_ms

Each cell that both have is judged by the bootstrap interval of after over before:

    slower     all of it is above 1 + threshold          a regression
    faster     all of it is below 1 / (1 + threshold)
    same       all of it is between the two
    unclear    it holds one of them: measure more rounds

An interval of one or two rounds tells how steps differ, not how another round would. So where A or
B has fewer than three rounds of a cell, it is slower only if all of the interval is above 2, faster
only if it is below 1/2, and unclear otherwise.

Peak memory that has grown by more than the threshold is a regression too, and so is a cell that
was measured before and has failed since, or whose gradient has become wrong.

A cell that was measured in A and is not in B has no verdict: the status is that of a regression,
unless --allow-missing says that B may have less. What only B has is listed.

exit status: 0, 1 for a regression or a missing cell, 2 for bad input or when nothing can be
compared
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import not_negative, option, program
from ddp_by_hand.measure.report_tables import milliseconds
from ddp_by_hand.measure.report_text import TRUSTED_ROUNDS, environment
from ddp_by_hand.measure.results import OK, UNAVAILABLE
from ddp_by_hand.measure.runs import EFFORT, MISSING, STEP, Cell, differing, read_cells, varying
from ddp_by_hand.measure.statistics import Ratio, ratio, summarize
from ddp_by_hand.measure.table import Column, format_table
from ddp_by_hand.measure.words import counted

MIN_ROUNDS = 3
LARGE_RATIO = 2.0  # with fewer rounds only a larger ratio of times has a verdict
SLOWER, FASTER, UNCHANGED, UNCLEAR = "slower", "faster", "same", "unclear"
LARGER, SMALLER = "larger", "smaller"
NOT_COMPARABLE, FAILED = "not comparable", "failed"


@dataclass
class Comparison:
    """Rows of the table and further findings.

    `regressions` are sentences; `missing` are those of `only_before` that had been measured.
    """

    rows: list[dict] = field(default_factory=list)
    regressions: list[str] = field(default_factory=list)
    only_before: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    only_after: list[str] = field(default_factory=list)

    @property
    def judged(self) -> bool:
        """Returns whether at least one cell has a verdict; a cell that fails now counts."""
        return any(row["status"] != NOT_COMPARABLE for row in self.rows)


@dataclass(frozen=True)
class Options:
    before: Path = option(metavar="A", help="results folder, or file of rows")
    after: Path = option(metavar="B", help="the same, judged against A")
    threshold: float = option(
        0.05,
        "the least change that counts, of times and of memory, as a fraction of A: a larger "
        "one calls less a regression (default: 0.05, that is 5 %%)",
        metavar="FRACTION",
        check=not_negative,
    )
    metric: str = option(
        STEP,
        "which times are judged: any list in the rows that ends with _ms, in milliseconds, "
        f"such as forward_backward_ms (default: {STEP}, complete steps)",
        metavar="NAME",
    )
    allow_missing: bool = option(
        False,
        "B may lack cells of A (default: one that was measured in A and is not in B is exit "
        "status 1)",
    )

    def __post_init__(self) -> None:
        if self.threshold >= 1:
            raise ValueError(
                f"--threshold {self.threshold:g}: give a fraction below 1, 0.05 for 5 %"
            )


@program("ddp_by_hand.measure.compare", Options)
def main(options: Options) -> int:
    with bad_input():
        before, after = read_cells(options.before), read_cells(options.after)
        for path, cells in ((options.before, before), (options.after, after)):
            check_metric(path, cells, options.metric)
        found = compare(before, after, options.threshold, options.metric)
        print(f"A: {options.before}\nB: {options.after}\n")
        print(describe(found, before, after, options.threshold))
        if found.missing and not options.allow_missing:
            print(f"Missing in B: {'; '.join(found.missing)}; give --allow-missing if B has less.")
        if not found.judged:
            raise ValueError("no cell can be compared: give results of the same settings")
    return int(bool(found.regressions or (found.missing and not options.allow_missing)))


def check_metric(path: Path, cells: Sequence[Cell], metric: str) -> None:
    """Raises ValueError for a metric that no cell has, though others were measured."""
    known = sorted({name for cell in cells for name in cell.metrics})
    if known and metric not in known:
        raise ValueError(f"--metric {metric}: not in {path}, which has {', '.join(known)}")


def compare(
    before: Sequence[Cell], after: Sequence[Cell], threshold: float, metric: str = STEP
) -> Comparison:
    """Judges every cell that both sides have, in the order of `before`."""
    found, left = Comparison(), list(after)
    extra = varying([*before, *after])
    for cell in before:
        other = _partner(cell, before, left)
        if other is None:
            name = _told_apart(cell, [*before, *after])
            found.only_before.append(name)
            found.missing += [name] if cell.status == OK else []
            continue
        left.remove(other)
        named = {key: cell.settings.get(key) for key in extra} | {"cell": cell.label}
        row = named | _judge(cell, other, threshold, metric)
        found.rows.append(row)
        found.regressions += _regressions(row, _told_apart(cell, before))
    found.only_after = [_told_apart(cell, [*before, *after]) for cell in left]
    return found


def _told_apart(cell: Cell, cells: Sequence[Cell]) -> str:
    """Returns a cell's label with what differs in cells of that name: `ddp (batch_size 4)`.

    These are settings, or else what it ran on.
    """
    others = [other for other in cells if other.names == cell.names]
    keys = {key: cell.settings[key] for other in others for key in _differing(cell, other)}
    if not keys:
        machines = [differing(cell.machine, other.machine) for other in others]
        keys = {key: cell.machine[key] for found in machines for key in found}
    what = ", ".join(f"{key} {value}" for key, value in keys.items())
    return f"{cell.label} ({what})" if what else cell.label


def _partner(cell: Cell, before: Sequence[Cell], after: Sequence[Cell]) -> Cell | None:
    """Returns the cell of the same name and settings, or of the same name if that is unique."""
    named = [other for other in after if other.names == cell.names]
    alike = [other for other in named if not _differing(cell, other)]
    if alike:
        return min(alike, key=lambda other: other.machine != cell.machine)
    unique = len(named) == 1 == sum(other.names == cell.names for other in before)
    return named[0] if unique else None


def _differing(cell: Cell, other: Cell) -> list[str]:
    return [key for key in differing(cell.settings, other.settings) if key not in EFFORT]


def _judge(before: Cell, after: Cell, threshold: float, metric: str) -> dict:
    """Returns the entries of a row: numbers and verdicts, or why there are none."""
    if keys := _differing(before, after):
        what = [f"{key} {before.settings[key]}, then {after.settings[key]}" for key in keys]
        return {"status": NOT_COMPARABLE, "reason": "; ".join(what)}
    was, now = _failure(before, metric), _failure(after, metric)
    if was or now:
        lost = now and not was and after.status not in (UNAVAILABLE, MISSING)
        text = f"before {was}" if was else f"now {now}"
        return {"status": FAILED if lost else NOT_COMPARABLE, "reason": text}
    was_times, now_times = (list(cell.times(metric).values()) for cell in (before, after))
    found = ratio(now_times, was_times, paired=False)
    rounds = min(len(was_times), len(now_times))
    row = {
        "status": OK, "time": verdict(found, threshold, rounds), "ratio": found,
        "before": summarize(before.samples(metric)).median,
        "after": summarize(after.samples(metric)).median,
        "memory_before": before.peak_memory_mb, "memory_after": after.peak_memory_mb,
    }  # fmt: skip
    if before.peak_memory_mb and after.peak_memory_mb:
        growth = after.peak_memory_mb / before.peak_memory_mb
        words = {SLOWER: LARGER, FASTER: SMALLER, UNCHANGED: UNCHANGED}
        exact = verdict(Ratio(growth, growth, growth), threshold)
        row |= {"memory_ratio": growth, "memory": words[exact]}
    return row


def _failure(cell: Cell, metric: str) -> str:
    """Returns why the cell has no times to trust; empty if it has."""
    if cell.status != OK:
        return " ".join(f"{cell.status}: {cell.reason or ''}".split()).rstrip(":")
    if cell.is_wrong:
        return f"wrong: gradient error {cell.gradient_error:.1e}"
    return "" if cell.samples(metric) else f"without {metric}"


def verdict(found: Ratio, threshold: float, rounds: int = MIN_ROUNDS) -> str:
    """Returns slower, faster, same or unclear.

    It is symmetric: with before and after exchanged, faster becomes slower and the others stay.

    Args:
        rounds: how many the interval rests on; below MIN_ROUNDS a ratio must exceed LARGE_RATIO.
    """
    is_known = rounds >= MIN_ROUNDS
    top = 1 + threshold if is_known else max(LARGE_RATIO, 1 + threshold)
    if found.low > top:
        return SLOWER
    if found.high < 1 / top:
        return FASTER
    return UNCHANGED if is_known and 1 / top <= found.low and found.high <= top else UNCLEAR


def _regressions(row: dict, name: str) -> list[str]:
    if row["status"] == FAILED:
        return [f"{name} has failed ({row['reason']})"]
    found = []
    if row.get("time") == SLOWER:
        found.append(f"{name} is slower, {row['ratio']}")
    if row.get("memory") == LARGER:
        found.append(f"{name} takes more memory, {row['memory_ratio']:.3f}")
    return found


def describe(
    found: Comparison, before: Sequence[Cell], after: Sequence[Cell], threshold: float
) -> str:
    """Returns the table, and below it rounds, differences and the conclusion."""
    extra = [key for key in varying([*before, *after]) if key not in EFFORT]
    columns = [
        Column("cell"), *(Column(key, format=str, right=False) for key in extra),
        Column("before", "A ms", milliseconds, right=True),
        Column("after", "B ms", milliseconds, right=True),
        Column("ratio", "B/A [95 %]", str, right=True), Column("time"),
        Column("memory_before", "A MiB", ",.0f", right=True),
        Column("memory_after", "B MiB", ",.0f", right=True),
        Column("memory_ratio", "B/A", ".3f", right=True), Column("memory"),
    ]  # fmt: skip
    lines = [format_table(columns, found.rows), ""] if found.rows else []
    lines += [f"only in A: {'; '.join(found.only_before)}"] if found.only_before else []
    lines += [f"only in B: {'; '.join(found.only_after)}"] if found.only_after else []
    lines += _differences(before, after)
    judged = [row for row in found.rows if row["status"] == OK]
    counts = [len(cell.good_rounds) for cell in (*before, *after) if cell.status == OK]
    rounds = min(counts, default=TRUSTED_ROUNDS)
    if judged and rounds < TRUSTED_ROUNDS:
        few = (
            f": below {MIN_ROUNDS} only what takes {LARGE_RATIO:g} times as long, or half, has a "
            "verdict"
        )
        lines.append(
            f"Intervals rest on {counted(rounds, 'round')}, and are too narrow"
            f"{few if rounds < MIN_ROUNDS else ''}. Measure {TRUSTED_ROUNDS} rounds or more to "
            "trust one (--rounds, where the program has it)."
        )
    return "\n".join([*lines, *([_conclusion(found, threshold)] if found.judged else [])])


def _differences(before: Sequence[Cell], after: Sequence[Cell]) -> list[str]:
    """Returns a line for each difference in hardware, versions and effort."""
    was, now = dict(environment(before)), dict(environment(after))
    keys = [key for key in {**was, **now} if key != "date" and was.get(key) != now.get(key)]
    lines = [f"{key}: {was.get(key, 'none')} in A, {now.get(key, 'none')} in B" for key in keys]
    for key in EFFORT:
        values = [
            ", ".join(sorted({str(c.settings[key]) for c in cells if key in c.settings}))
            for cells in (before, after)
        ]
        if all(values) and values[0] != values[1]:
            lines.append(f"{key}: {values[0]} in A, {values[1]} in B")
    return lines


def _conclusion(found: Comparison, threshold: float) -> str:
    beyond = f"beyond {100 * threshold:g} %"
    if found.regressions:
        count = len(found.regressions)
        return f"{counted(count, 'regression')} {beyond}: {'; '.join(found.regressions)}."
    verdicts = Counter(row.get("time", row["status"]) for row in found.rows)
    return f"No regression {beyond}: {', '.join(f'{n} {v}' for v, n in verdicts.items())}."


if __name__ == "__main__":
    sys.exit(main())
