"""What a report, or a comparison, says in words: findings, environment, settings."""

from collections import Counter
from collections.abc import Sequence

from measure.report_tables import baselines, milliseconds
from measure.results import OK
from measure.runs import BASELINES, SECTION, Cell, beside, ratio_beside, varying
from measure.statistics import NOISY, summarize
from measure.table import MISSING

ENOUGH = 5  # rounds from which an interval can be trusted: see `measure.statistics.ratio`


def findings(cells: Sequence[Cell]) -> list[str]:
    """What to know before, and instead of, reading the tables."""
    counts = Counter(cell.status for cell in cells)
    found = [f"{len(cells)} cells: {', '.join(f'{n} {status}' for status, n in counts.items())}."]
    for cell in cells:
        if cell.is_wrong:
            found.append(
                f"The gradient of {cell.label} is WRONG (error {cell.gradient_error:.1e}): its "
                "times mean nothing."
            )
    for length in dict.fromkeys(cell.names.get(SECTION) for cell in cells):
        own = [cell for cell in cells if cell.names.get(SECTION) == length]
        found += [line for baseline in baselines(own) for line in _fastest(own, *baseline)]
    return [*found, *_doubts(cells)]


def _fastest(cells: Sequence[Cell], name: str, value: str, heading: str) -> list[str]:
    """A line for each baseline of that name: which cell is fastest beside it.

    The floor itself is no competitor, nor is a wrong gradient. Of prices of clipping the least of
    all is said.
    """
    floor = BASELINES[name][0]
    groups: dict[str, list] = {}
    for cell in cells:
        out = cell.is_wrong or cell.names.get(name) == floor
        other = None if out else beside(cells, cell, name, value)
        found = ratio_beside(cell, other)
        if found is not None:
            group = heading if name == "clipping" else other.label
            groups.setdefault(group, []).append((found.value, cell, found, other))
    lines = []
    for ratios in groups.values():
        _, cell, best, other = min(ratios, key=lambda entry: entry[0])
        median = milliseconds(summarize(other.samples()).median)
        doubt = "; it holds 1, so no difference is shown" if best.low <= 1 <= best.high else ""
        lines.append(
            f"Fastest of those compared with {other.label} ({median} ms): {cell.label}, "
            f"{best.value:.3f} × its time, 95 % interval [{best.low:.3f}, {best.high:.3f}]{doubt}."
        )
    return lines


def _doubts(cells: Sequence[Cell]) -> list[str]:
    """Why the numbers may say less than they seem to."""
    measured = [cell for cell in cells if cell.status == OK and cell.samples()]
    found = []
    for cell in measured:
        step = summarize(cell.samples())
        name = next(iter(cell.names))
        is_floor = cell.names[name] == BASELINES[name][0]
        if is_floor and step.p90 > NOISY * step.p10:
            found.append(
                f"The machine was busy: steps of {cell.label} took {step.p10:.0f} to "
                f"{step.p90:.0f} ms. Close other programs, or measure more rounds, before you "
                "compare."
            )
    rounds = min((len(cell.good_rounds) for cell in measured), default=ENOUGH)
    if rounds < ENOUGH:
        found.append(
            f"Intervals rest on {rounds} round{'s' * (rounds > 1)}, and are too narrow: they know "
            f"little of how another round would differ. {ENOUGH} or more (--rounds) can be trusted."
        )
    different = [f"{key} {value}" for key, value in environment(cells) if "; " in value]
    if different:
        found.append(f"Not all was measured alike: {', '.join(different)}.")
    return found


def environment(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """(name, value): hardware, versions, dates; what differed between rows is joined by `; `."""
    places = [place for cell in cells for place in cell.environments]
    dates = sorted({str(place["date"])[:16] for place in places if place.get("date")})
    found: dict[str, dict[str, None]] = {"date": {}, "GPUs": {}, "cpu": {}, "torch": {}}
    if dates:
        ends = dates if len(dates) < 3 else [dates[0], dates[-1]]
        found["date"] = {" to ".join(end.replace("T", " ") for end in ends) + " UTC": None}
    for place in places:
        for key, value in place.items():
            if key == "gpus":
                found["GPUs"][_gpus(value)] = None
            elif key == "git_commit" and value:
                changed = " with changes" if place.get("git_dirty") else ""
                found.setdefault("commit", {})[f"{value[:12]}{changed}"] = None
            elif key not in ("date", "command", "git_commit", "git_dirty") and value is not None:
                found.setdefault(key, {})[str(value)] = None
    for cell in cells:
        for key, value in cell.machine.items():
            found.setdefault(key, {})[str(value)] = None
    return [(key.replace("_", " "), "; ".join(values)) for key, values in found.items() if values]


def _gpus(gpus: Sequence[dict]) -> str:
    kinds = Counter(f"{gpu.get('name')}, {gpu.get('memory_mb', 0):,} MiB" for gpu in gpus)
    return " and ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "none"


def settings(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """(name, value) of what cells have in common, sizes of the network included."""
    different = {*varying(cells)}
    shared = {k: v for cell in cells for k, v in cell.settings.items() if k not in different}
    for key in ("total_batch_size", "vocab_size", "parameters", "trained_parameters"):
        values = {cell.facts[key] for cell in cells if key in cell.facts}
        shared |= {key: values.pop()} if len(values) == 1 else {}
    return [(key, _plain(value)) for key, value in shared.items()]


def _plain(value: object) -> str:
    return MISSING if value is None else f"{value:,}" if type(value) is int else str(value)


def subtitle(cells: Sequence[Cell]) -> str:
    place = dict(environment(cells))
    where = place.get("GPUs", "none")
    where = place.get("cpu", "") if where == "none" else where
    ranks = sorted({str(c.settings["world_size"]) for c in cells if "world_size" in c.settings})
    parts = [
        f"{len(cells)} cells", f"{' or '.join(ranks)} ranks" if ranks else "", where,
        f"torch {place['torch']}" if "torch" in place else "", place.get("date", ""),
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)
