"""Checks the fields of a row, and refuses a wrong row by the field's name.

Fields that are not listed may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMBER, TEXT, LIST, OBJECT = "a number", "text", "a list", "an object"
_KINDS = {
    dict: OBJECT, list: LIST, str: TEXT, int: NUMBER, float: NUMBER, bool: "true or false",
    type(None): "null",
}  # fmt: skip
_ROW = {
    "implementation": TEXT, "clipping": TEXT, "mode": TEXT, "ran_as": TEXT, "status": TEXT,
    "variant": TEXT, "row": TEXT,
    "seq_length": NUMBER, "batch_size": NUMBER, "num_processes": NUMBER, "round": NUMBER,
    "rounds": LIST,
}  # fmt: skip
_OR_NULL = {
    "config": OBJECT, "environment": OBJECT, "phases_ms": OBJECT, "command": LIST, "reason": TEXT,
    "total_batch_size": NUMBER, "collectives": NUMBER, "bytes": NUMBER, "tolerance": NUMBER,
    "gradient_error": NUMBER, "peak_memory_mb": NUMBER, "peak_memory_bytes": NUMBER,
    "git_commit": TEXT, "gpus": LIST,
}  # fmt: skip


def check_fields(row: Mapping[str, Any], place: str = "") -> None:
    """Raises ValueError that names the field: `rounds[1].step_ms[0] is text, not a number`."""
    for name, value in row.items():
        _check(name, value, f"{place}{name}")


def _check(name: str, value: Any, place: str) -> None:
    """Raises ValueError for a field of another kind; `place` is its name from the row on."""
    wanted = _ROW.get(name, _OR_NULL.get(name))
    if wanted and not (value is None and name in _OR_NULL):
        check_kind(value, wanted, place)
    if name in ("rounds", "gpus"):
        for number, one in enumerate(value or ()):
            check_kind(one, OBJECT, f"{place}[{number}]")
            check_fields(one, f"{place}[{number}].")
    elif name == "environment":
        check_fields(value or {}, f"{place}.")
    elif name == "phases_ms":
        for phase, ms in (value or {}).items():
            check_kind(ms, NUMBER, f"{place}.{phase}")
    elif name == "memory_mb":  # of a GPU
        check_kind(value, NUMBER, place)
    elif name.endswith("_ms") and isinstance(value, list):
        for number, ms in enumerate(value):
            check_kind(ms, NUMBER, f"{place}[{number}]")


def check_kind(value: Any, wanted: str, place: str) -> None:
    """Raises ValueError for a value of another kind; `wanted` is one of the constants above."""
    kind = _KINDS.get(type(value), type(value).__name__)
    if kind != wanted:
        raise ValueError(f"{place} is {kind}, not {wanted}")
