"""Table of `--enable-profiling`: where the time of the checked steps went, one row per case."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_by_hand.experiments.verify_correctness.findings import Finding
from ddp_by_hand.measure import Column, format_table
from dp_clipping.profiling.profile import RANGES, Profile

LEGEND = (
    "ms: medians over a case's four steps on the first rank, not covered by epsilon. Norms are a\n"
    "part of the first backward, sums and a second backward of the weighted sums. The networks\n"
    "are small: this shows which phases a mode has, not how fast it is."
)


def phase_times(profile: Profile | None) -> dict[str, float]:
    """Returns phase (as `RANGES` names it) -> milliseconds per step; empty without a profile.

    What ends with / are layers: theirs are added up.
    """
    if profile is None:
        return {}
    times = {name: one["ms"] for name, one in profile.median().items()}
    found: dict[str, float] = {}
    for name, title in RANGES.items():
        are_layers = name.endswith("/")
        own = [ms for n, ms in times.items() if n == name or (are_layers and n.startswith(name))]
        if own:
            found[title.strip()] = sum(own)
    return found


def phase_table(findings: Sequence[Finding]) -> str:
    """Formats the phases of the cases that have some; omits phases that no case has."""
    rows = [
        {"network": f.case.network, "mode": f.case.how, "clipping": f.case.clipping,
         "norms travel": f.case.norm_reduction, **f.phases}
        for f in findings if f.phases
    ]  # fmt: skip
    titles = [title.strip() for title in RANGES.values()]
    known = [title for title in titles if any(title in row for row in rows)]
    names = ["network", "mode", "clipping"]
    names += ["norms travel"] if any(row["norms travel"] for row in rows) else []
    columns = [*names, *(Column(title, format=".2f", right=True) for title in known)]
    return f"{format_table(columns, rows, title='phases, ms per step')}\n\n{LEGEND}\n"
