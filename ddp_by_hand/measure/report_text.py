"""Text of a report or comparison: findings, environment, settings."""

from collections import Counter
from collections.abc import Iterator, Sequence

from ddp_by_hand.measure.report_tables import baselines, milliseconds, ran_as, say_ran_as
from ddp_by_hand.measure.results import OK
from ddp_by_hand.measure.runs import BASELINES, SECTION, Cell, beside, ratio_beside, varying
from ddp_by_hand.measure.statistics import NOISY, summarize
from ddp_by_hand.measure.table import NO_VALUE
from ddp_by_hand.measure.words import counted

TRUSTED_ROUNDS = 5  # rounds from which an interval can be trusted: see `measure.statistics.ratio`


def findings(cells: Sequence[Cell]) -> list[str]:
    """Returns sentences that sum up the tables."""
    counts = Counter(cell.status for cell in cells)
    statuses = ", ".join(f"{n} {status}" for status, n in counts.items())
    found = [f"{counted(len(cells), 'cell')}: {statuses}."]
    for cell in cells:
        if cell.is_wrong:
            found.append(
                f"The gradient of {cell.label} is WRONG (error {cell.gradient_error:.1e}): its "
                "times mean nothing."
            )
    if references := say_ran_as(cells):
        found.append(f"{', '.join(references)}, in plain PyTorch: there were no fused kernels.")
    for length in dict.fromkeys(cell.names.get(SECTION) for cell in cells):
        own = [cell for cell in cells if cell.names.get(SECTION) == length]
        found += [line for baseline in baselines(own) for line in _fastest(own, *baseline)]
    return [*found, *_doubts(cells)]


def _fastest(cells: Sequence[Cell], name: str, value: str, heading: str) -> list[str]:
    """Returns a line for each baseline of that name: which of these cells is fastest.

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
        length = cell.names.get(SECTION)
        at = "" if length is None else f" at {length:,} tokens"
        reference = f" (ran as {ran_as(cell)})" if ran_as(cell) else ""
        doubt = "; it holds 1, so no difference is shown" if best.low <= 1 <= best.high else ""
        lines.append(
            f"Fastest{at} of those compared with {other.subject} ({median} ms): "
            f"{cell.subject}{reference}, "
            f"{best.value:.3f} × its time, 95 % interval [{best.low:.3f}, {best.high:.3f}]{doubt}."
        )
    return lines


def _doubts(cells: Sequence[Cell]) -> list[str]:
    """Returns remarks on the numbers: noise, few rounds, different machines."""
    measured = [cell for cell in cells if cell.status == OK and cell.samples()]
    found = []
    steps = [(cell, summarize(cell.samples())) for cell in measured]
    wide = [(step.p90 / step.p10, cell, step) for cell, step in steps]
    wide = sorted((w for w in wide if w[0] > NOISY), key=lambda w: -w[0])
    if wide:
        _, cell, step = wide[0]
        more = len(wide) - 1
        others = f", and those of {counted(more, 'other cell')} spread too" if more else ""
        found.append(
            f"The machine was busy: steps of {cell.label} took {step.p10:.0f} to {step.p90:.0f} ms"
            f"{others}. Close other programs, or measure more steps, before you compare."
        )
    rounds = min((len(cell.good_rounds) for cell in measured), default=TRUSTED_ROUNDS)
    if rounds < TRUSTED_ROUNDS and any(_compared(measured)):
        found.append(
            f"Intervals rest on {counted(rounds, 'round')}, and are too narrow: they know little "
            f"of how another round would differ. {TRUSTED_ROUNDS} or more (--rounds) can be "
            "trusted."
        )
    different = [f"{key} {value}" for key, value in environment(cells) if "; " in value]
    if different:
        found.append(f"Not all was measured alike: {', '.join(different)}.")
    return found


def _compared(cells: Sequence[Cell]) -> Iterator[bool]:
    """Yields for each length whether there is a baseline."""
    for length in dict.fromkeys(cell.names.get(SECTION) for cell in cells):
        yield bool(baselines([cell for cell in cells if cell.names.get(SECTION) == length]))


def environment(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Returns (name, value) of hardware, versions, dates; values that differ are joined by `; `."""
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
    """Returns (name, value) pairs of what cells have in common, with sizes of the network."""
    different = {*varying(cells)}
    shared = {k: v for cell in cells for k, v in cell.settings.items() if k not in different}
    for key in ("total_batch_size", "vocab_size", "parameters", "trained_parameters"):
        values = {cell.facts[key] for cell in cells if key in cell.facts}
        shared |= {key: values.pop()} if len(values) == 1 else {}
    return [(key, _plain(value)) for key, value in shared.items()]


def _plain(value: object) -> str:
    return NO_VALUE if value is None else f"{value:,}" if type(value) is int else str(value)


def subtitle(cells: Sequence[Cell]) -> str:
    place = dict(environment(cells))
    where = place.get("GPUs", "none")
    where = place.get("cpu", "") if where == "none" else where
    ranks = sorted({c.settings["world_size"] for c in cells if "world_size" in c.settings})
    parts = [
        counted(len(cells), "cell"), _ranks(ranks), where,
        f"torch {place['torch']}" if "torch" in place else "", place.get("date", ""),
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _ranks(counts: Sequence[int]) -> str:
    *others, last = counts or [0]
    return " or ".join([*map(str, others), counted(last, "rank")]) if counts else ""
