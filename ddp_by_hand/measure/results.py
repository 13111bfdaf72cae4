"""Results of an experiment: one JSON line per finished cell, resumable.

A *cell* is one configuration that is measured on its own (an implementation in one round, a mode
at one sequence length). Its result is a *row*: a flat dictionary with a `key` that identifies the
cell, a `status`, and whatever was measured. Rows are only ever appended; a cell that is tried
again gets a new row, and the newest one counts.
"""

import hashlib
import json
import math
from collections.abc import Callable, Hashable
from pathlib import Path
from statistics import median

from ddp_by_hand.measure.files import append_line, read_lines
from ddp_by_hand.measure.row_fields import TEXT, check_kind

SCHEMA_VERSION = 1

OK = "ok"  # measured
OOM = "oom"  # out of memory
ERROR = "error"  # raised, or died
TIMEOUT = "timeout"  # did not end in time
UNAVAILABLE = "unavailable"  # cannot run on this machine, and the row's `reason` says why

STATUSES = (OK, OOM, ERROR, TIMEOUT, UNAVAILABLE)
FINISHED = (OK, UNAVAILABLE)  # another try on the same machine would tell nothing new


def cell_key(config: dict) -> str:
    """Returns the identity of a cell: 16 hexadecimal digits, the same for equal configurations.

    The order of the entries does not matter, tuples equal lists, and any other value (a path, a
    numpy number) counts as what it becomes in JSON. A configuration with NaN is a `ValueError`:
    it would not equal itself.
    """
    text = json.dumps(config, sort_keys=True, allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Results:
    """The rows in `folder/results.jsonl`; the folder is created by the first `record`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.path = self.folder / "results.jsonl"
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"results folder {self.folder} is a file: name another folder")
        self.rows()  # a folder of another version is refused before anything is measured

    def finished(self, key: str) -> bool:
        """Returns whether the cell's newest row is `ok` or `unavailable`: no further run."""
        return any(row["key"] == key and row["status"] in FINISHED for row in self.rows())

    def record(self, row: dict) -> None:
        """Appends `row`, which has a `status` and either a `key` or the `config` it follows from.

        `schema_version` is added. JSON has no NaN and no infinity: such numbers become null.
        """
        status = row.get("status")
        if status not in STATUSES:
            raise ValueError(f"row status {status!r} is unknown; known: {', '.join(STATUSES)}")
        key = row["key"] if "key" in row else cell_key(row["config"])
        self.folder.mkdir(parents=True, exist_ok=True)
        complete = {"schema_version": SCHEMA_VERSION, "key": key, **row}
        line = json.dumps(_finite(complete), allow_nan=False, default=_plain)
        append_line(self.path, line)

    def rows(self) -> list[dict]:
        """Returns the newest row of every cell, in the order in which cells first appeared."""
        return newest_rows(self.path)

    def fastest_rounds(self, kind: str, of: Callable[[dict], Hashable]) -> dict:
        """Returns what `of` a row's config -> implementation -> the median step in milliseconds.

        That is of the fastest round, because other programs only slow a round down.
        """
        found: dict[Hashable, dict[str, float]] = {}
        for row in self.rows():
            if row.get("kind") == kind and row["status"] == OK:
                own, name = found.setdefault(of(row["config"]), {}), row["implementation"]
                own[name] = min(median(row["step_ms"]), own.get(name, math.inf))
        return found


def newest_rows(path: str | Path) -> list[dict]:
    """Returns the newest row of every cell of a file, in the order in which cells first appeared.

    Raises:
        ValueError: a line is no row of this version.
    """
    return [row for _, row in numbered_rows(path)]


def numbered_rows(path: str | Path) -> list[tuple[int, dict]]:
    """Returns `newest_rows`, each with the number of its line, from 1 on."""
    newest = {}
    for number, row in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        check_version(where, row)
        if "key" not in row:
            raise ValueError(f"{where}: a row has no key, so it is not of this program")
        check_kind(row["key"], TEXT, f"{where}: key")
        newest[row["key"]] = number, row
    return list(newest.values())


def check_version(path: str | Path, row: dict) -> None:
    """Raises ValueError, which begins with `path`, unless it is a row of this version."""
    version = row.get("schema_version") if isinstance(row, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, this program reads and writes "
            f"{SCHEMA_VERSION}: name another folder"
        )


def _plain(value):
    """Converts what `json` does not know: numpy values to Python's, and paths to their name."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _finite(value):
    """Copies nested dictionaries, lists and numbers with None in place of NaN and infinity."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
