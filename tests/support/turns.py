"""Tests of many cases in many ways: fast ones try each case in some of them, slow ones in all."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def in_turn(
    cases: Iterable[Any], ways: Mapping[str, Any] | Iterable[Any], start: int = 0, fast: int = 1
) -> list[ParameterSet]:
    """Returns each case with each way, of which `fast` are not slow: others for the next case.

    `cases`: values, or parameters with ids. `ways`: values, or their names and values. `start`: the
    way of the first case, so that two tests need not agree.
    """
    named = ways if isinstance(ways, Mapping) else {str(way): way for way in ways}
    cases = [
        case if isinstance(case, ParameterSet) else pytest.param(case, id=str(case))
        for case in cases
    ]
    return [
        pytest.param(
            *case.values, way, id=f"{case.id}-{name}",
            marks=[*case.marks, *[pytest.mark.slow] * ((k - n) % len(named) >= fast)],
        )
        for n, case in enumerate(cases, start)
        for k, (name, way) in enumerate(named.items())
    ]  # fmt: skip
