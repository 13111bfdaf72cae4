"""Tables of the price experiments: ratios to the ordinary step, growth with the length."""

from math import exp, log

from measure import Column, format_table, ratio, summarize

FEWEST = 3  # lengths of one batch size that a growth is fitted to


def report(results: list[dict]) -> str:
    """One line a row and variant: ratios to `ordinary` of the same rounds; growths, if rows with
    one batch size and several lengths are among them."""
    lines = []
    for row in dict.fromkeys(cell["row"] for cell in results):
        cells = [c for c in results if c["row"] == row and "step_ms" in c]
        base = [c for c in cells if c["variant"] == "ordinary"]
        for variant in dict.fromkeys(c["variant"] for c in cells):
            own = [c for c in cells if c["variant"] == variant]
            peak = max(c["peak_mib"] for c in own)
            step = summarize([x for c in own for x in c["step_ms"]]).median
            line = {"row": row, "variant": variant, "step ms": step, "peak MiB": peak}
            if base:
                whole, part = (_ratio(own, base, key) for key in ("step_ms", "without_step_ms"))
                line |= {
                    "ratio": whole.value, "low": whole.low, "high": whole.high,
                    "without step": part.value,
                    "peak ratio": peak / max(c["peak_mib"] for c in base),
                }  # fmt: skip
            lines.append(line)
    columns = ["row", "variant", Column("step ms", format=".1f")]
    columns += [Column(key, format=".3f") for key in ("ratio", "low", "high", "without step")]
    columns += [Column("peak MiB", format=",.0f"), Column("peak ratio", format=".3f")]
    growths = [
        f"B = {batch}, {variant}: step time grows as T^{exponent:.2f} (points within {spread:.3f}x)"
        for (batch, variant), (exponent, spread) in fit_growth(lines).items()
    ]
    return "\n".join([format_table(columns, lines), *growths])


def fit_growth(lines: list[dict]) -> dict[tuple[int, str], tuple[float, float]]:
    """(batch size, variant) -> the exponent e of step time ~ T^e, and how far the worst point is.

    Least squares in logarithms, over the rows of one batch size if there are three or more.
    """
    points: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for line in lines:
        batch, tokens = map(int, line["row"].split("x"))
        points.setdefault((batch, line["variant"]), []).append((log(tokens), log(line["step ms"])))
    found = {}
    for key, own in points.items():
        if len({x for x, _ in own}) < FEWEST:
            continue
        mean_x, mean_y = (sum(values) / len(own) for values in zip(*own, strict=True))
        exponent = sum((x - mean_x) * (y - mean_y) for x, y in own)
        exponent /= sum((x - mean_x) ** 2 for x, _ in own)
        worst = max(abs(y - mean_y - exponent * (x - mean_x)) for x, y in own)
        found[key] = exponent, exp(worst)
    return found


def _ratio(own: list[dict], base: list[dict], key: str):
    rounds = sorted({c["round"] for c in own} & {c["round"] for c in base})
    pick = lambda cells: [next(c[key] for c in cells if c["round"] == r) for r in rounds]  # noqa: E731
    return ratio(pick(own), pick(base))
