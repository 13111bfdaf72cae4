"""Tables of what variants cost: ratios to the ordinary step, growth with the length."""

from collections.abc import Iterable

from experiments.rounds import BASELINE
from measure import Column, Ratio, format_table, ratio, summarize
from measure.growth import MIN_LENGTHS, Growth, fit_growth

RATIOS = """\
ratio [low, high]: complete steps, with noise and AdamW, against ordinary ones of the same rounds
and its 95 % interval, which means little below three rounds; without step: forward, backward and
exchange alone"""
PLACES = "times are of the slowest rank, peaks of the largest"


def legend(results: list[dict]) -> str:
    """Returns the legend of `report` for several ranks; explains ratios only if there are some."""
    measured = {cell["variant"] for cell in results}
    return f"{RATIOS}; {PLACES}" if BASELINE in measured and len(measured) > 1 else PLACES


def report(results: list[dict]) -> str:
    """Formats one line per row and variant, with ratios to the ordinary steps of the same rounds.

    Growths have 95 % intervals; they need rows of several lengths with one batch size.
    """
    lines = []
    for row in dict.fromkeys(cell["row"] for cell in results):
        cells = [c for c in results if c["row"] == row and "step_ms" in c]
        base = [c for c in cells if c["variant"] == BASELINE]
        variants = dict.fromkeys(c["variant"] for c in cells)
        for variant in sorted(variants, key=lambda name: name != BASELINE):
            own = [c for c in cells if c["variant"] == variant]
            peak = max(c["peak_memory_mb"] for c in own)
            step = summarize([x for c in own for x in c["step_ms"]]).median
            line = {"row": row, "variant": variant, "step ms": step, "peak MiB": peak}
            if {c["round"] for c in own} & {c["round"] for c in base}:
                whole, part = (
                    ratio_of_rounds(own, base, key) for key in ("step_ms", "without_step_ms")
                )
                line |= {
                    "ratio": whole.value, "low": whole.low, "high": whole.high,
                    "without step": part.value,
                    "peak ratio": peak / max(c["peak_memory_mb"] for c in base),
                }  # fmt: skip
            lines.append(line)
    columns = ["row", "variant", Column("step ms", format=".1f")]
    columns += [Column(key, format=".3f") for key in ("ratio", "low", "high", "without step")]
    columns += [Column("peak MiB", format=",.0f"), Column("peak ratio", format=".3f")]
    growths = [
        f"B = {batch}, {variant}: step time grows as {growth}"
        for (batch, variant), growth in growths_of(lines).items()
    ]
    return "\n".join([format_table(columns, lines), *growths])


def growths_of(lines: Iterable[dict]) -> dict[tuple[int, str], Growth]:
    """Returns (batch size, variant) -> growth of step time, where lengths suffice for an interval.

    A line has `row` (BxT), `variant` and `step ms`.
    """
    points: dict[tuple[int, str], dict[int, float]] = {}
    for line in lines:
        batch, tokens = map(int, line["row"].split("x"))
        points.setdefault((batch, line["variant"]), {})[tokens] = line["step ms"]
    return {
        key: fit_growth(list(own), list(own.values()))
        for key, own in points.items()
        if len(own) >= MIN_LENGTHS
    }


def ratio_of_rounds(own: list[dict], base: list[dict], key: str) -> Ratio:
    """Returns the ratio of two variants' times in the rounds that both have."""
    rounds = sorted({c["round"] for c in own} & {c["round"] for c in base})
    pick = lambda cells: [next(c[key] for c in cells if c["round"] == r) for r in rounds]  # noqa: E731
    return ratio(pick(own), pick(base))
