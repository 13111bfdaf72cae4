"""Reads results back: one `Cell` for each configuration, with all its rounds.

What is read of a row of `results.jsonl`, or of a `*_result.json`; anything else is left alone:

| entry | meaning |
| --- | --- |
| `implementation`, `clipping`, `mode`, `seq_length`, `variant`, `row` | what the cell is called |
| `config` and, beside it, `batch_size`, `num_processes` | its settings |
| `config.device`, `config.torch`, `config.source`, `device_type`, `backend` | what it ran on |
| `kind`: `gate` | a proof, not a time: `gradient_error`, wrong above `tolerance` |
| `round`, `status`, `reason`, `*_ms`, `peak_memory_bytes` | one round: lists of times, bytes |
| `rounds` | or a list of such, with `peak_memory_mb` |
| `cells` | of a JSON file: its rows, which share what stands beside them |
| `total_batch_size`, `collectives`, `bytes`, `plan`, sizes of the network | facts |
| `phases_ms` | phase -> its milliseconds in a step |
| `host_ms`, `kernel_ms`, `launches` | of a step: issued, run on the GPU, how many kernels |
| `ran_as` | the mode whose way of computing it was, where its own could not be |
| `environment`, `command` | where it was measured, and what was typed |

Memory is in MiB, times are in milliseconds.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_by_hand.measure.results import OK, STATUSES, check_version, numbered_rows
from ddp_by_hand.measure.row_fields import check_fields
from ddp_by_hand.measure.statistics import Ratio, ratio_of_rounds

STEP = "step_ms"
NAMES = ("implementation", "clipping", "mode", "variant", "row", "seq_length")
SECTION = "seq_length"  # of the names: other lengths are other work, so each has its own table
BASELINES = {
    "implementation": ("none", "torch_ddp"), "clipping": ("none",), "mode": ("no_dp",),
    "variant": ("ordinary", "default"),
}  # fmt: skip
"""Which values of a name the others are compared with, where they have been measured."""
ORDER = ("ghost_fsdp", "flash_fsdp", "bookkeeping_fsdp", "flash_bookkeeping_fsdp")
"""Modes as tables and pictures show them; others come behind, as they came."""
EFFORT = ("num_epochs", "warmup_epochs", "steps_per_epoch", "num_iter", "warmup_iter", "seed")
"""Settings that say how much was measured: they do not change what a step does."""
SIZES = ("vocab_size", "parameters", "trained_parameters")
_FACTS = (
    "total_batch_size", "collectives", "bytes", "plan", "tolerance", "phases_ms", "ran_as",
    "host_ms", "kernel_ms", "launches",
)  # fmt: skip
_MACHINE = ("device", "torch", "source")  # of `config`
_PLACE = ("device_type", "backend")  # beside `config`
_SAID_BY_NAMES = ("kind", "round", "clipping.mode", "clipping.norm_algorithm")
_GATE = "gate"
MISSING = "missing"  # status of a cell of which there is a proof, and no time yet
_MIB = 1 << 20


@dataclass(frozen=True)
class Round:
    """One measurement of a cell: lists of milliseconds by metric, the peak of memory in MiB."""

    number: int
    status: str
    reason: str | None
    times: dict[str, list[float]]
    peak_memory_mb: float | None


@dataclass
class Cell:
    """One configuration: what it is called, what it was measured with, and all that was measured.

    Attributes:
        gradient_error: the gradient error of the gate, infinite if it was not finite; None if there
            was none.
        commands: those that measured it, as typed, with the date of the first row.
    """

    names: dict[str, str | int]
    settings: dict[str, object]
    machine: dict[str, object]
    facts: dict[str, object] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    gate: Round | None = None
    gradient_error: float | None = None
    environments: list[dict] = field(default_factory=list)
    commands: dict[tuple[str, ...], str] = field(default_factory=dict)

    @property
    def good_rounds(self) -> list[Round]:
        return [r for r in self.rounds.values() if r.status == OK]

    @property
    def failures(self) -> list[Round]:
        """Returns the failed rounds, also where another succeeded; the gate has number -1."""
        gate = [] if self.gate is None else [self.gate]
        return [r for r in (*gate, *self.rounds.values()) if r.status != OK]

    @property
    def status(self) -> str:
        """`ok` if the gate passed and steps were timed; otherwise how it failed, or `missing`."""
        if self.gate is not None and self.gate.status != OK:
            return self.gate.status
        if self.samples():
            return OK
        return self.failures[-1].status if self.failures else MISSING

    @property
    def reason(self) -> str | None:
        if self.status in (OK, MISSING):
            return None if self.status == OK else "not measured yet"
        return (self.gate if self.gate in self.failures else self.failures[-1]).reason

    @property
    def is_wrong(self) -> bool:
        """Returns whether its gradient differs from what one process computes."""
        if self.gradient_error is None:
            return False
        return not self.gradient_error <= self.facts.get("tolerance", math.inf) or math.isinf(
            self.gradient_error
        )

    @property
    def label(self) -> str:
        """Returns its name: `ddp`, `ddp, ghost` or `no_dp, 1024 tokens`."""
        named = {k: v for k, v in self.names.items() if (k, v) != ("clipping", "none")}
        return ", ".join(f"{v} tokens" if k == "seq_length" else str(v) for k, v in named.items())

    @property
    def subject(self) -> str:
        """Returns the label without the length of the samples."""
        names = {k: v for k, v in self.names.items() if k != SECTION}
        return Cell(names, {}, {}).label

    @property
    def peak_memory_mb(self) -> float | None:
        """Returns the largest peak of its rounds."""
        peaks = (r.peak_memory_mb for r in self.good_rounds if r.peak_memory_mb is not None)
        return max(peaks, default=None)

    @property
    def tokens_per_step(self) -> float | None:
        """Returns the number of tokens that all ranks process in a step."""
        length = self.names.get("seq_length", self.settings.get("model.context_length"))
        whole = self.facts.get("total_batch_size")
        if whole is None and "batch_size" in self.settings and "world_size" in self.settings:
            whole = self.settings["batch_size"] * self.settings["world_size"]
        return None if whole is None or length is None else whole * length

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(metric for r in self.good_rounds for metric in r.times))

    def times(self, metric: str = STEP) -> dict[int, list[float]]:
        """Returns round -> its times, of the rounds that went well and have that metric."""
        return {r.number: r.times[metric] for r in self.good_rounds if metric in r.times}

    def samples(self, metric: str = STEP) -> list[float]:
        return [ms for times in self.times(metric).values() for ms in times]


def read_cells(path: str | Path) -> list[Cell]:
    """Reads the cells of a results folder, or of a file of rows, in order of appearance.

    In a folder `*_result.json` files count, which hold all rounds of a cell, or else
    `results.jsonl`.

    Raises:
        ValueError: there are no results, or the files are of another kind.
    """
    cells: dict[str, Cell] = {}
    for source, row in _rows(Path(path)):
        try:
            check_fields(row)
            _add(cells, row)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{source}: not a row of results: {what}; remove it, or name another folder"
            ) from None
    if not cells:
        raise ValueError(f"{path}: no results there (results.jsonl or *_result.json)")
    return list(cells.values())


def cells_of(rows: Iterable[dict]) -> list[Cell]:
    """Returns the cells of rows that this process has measured itself, in order of appearance."""
    cells: dict[str, Cell] = {}
    for row in rows:
        _add(cells, row)
    return list(cells.values())


def _rows(path: Path) -> Iterable[tuple[str, dict]]:
    """Yields (file, with the line where it has several; row)."""
    if not path.exists():
        raise ValueError(f"{path}: no such folder or file")
    if path.is_dir():
        files = sorted(path.glob("*_result.json")) or [path / "results.jsonl"]
    else:
        files = [path]
    for file in files:
        try:
            if file.suffix == ".json":
                rows = _rows_of_json(file)
            else:
                rows = [(f"{file}, line {number}", row) for number, row in numbered_rows(file)]
        except (ValueError, OSError) as error:
            # of JSON that cannot be parsed the message does not name the file
            where = "" if str(file) in str(error) else f"{file}: "
            raise ValueError(f"{where}{error}") from None
        for where, row in rows:
            check_version(where, row)
            yield where, row


def _rows_of_json(file: Path) -> list[tuple[str, dict]]:
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        return [(str(file), content)]
    shared = {key: value for key, value in content.items() if key != "cells"}
    return [
        (f"{file}, cell {number}", {**shared, **cell})
        for number, cell in enumerate(content["cells"], start=1)
    ]


def _add(cells: dict[str, Cell], row: dict) -> None:
    """Adds a row to its cell; the newest counts and is added last."""
    made = _identify(row)
    identity = json.dumps([made.names, made.settings, made.machine], sort_keys=True)
    cell = cells.setdefault(identity, made)
    if row.get("kind") == _GATE:
        cell.gate = _round(row)
        if cell.gate.status == OK:
            error = row["gradient_error"]  # JSON has no infinity
            cell.gradient_error = math.inf if error is None else float(error)
    else:
        for one in row.get("rounds", [row]):
            cell.rounds[one["round"]] = _round(one)
    config = row.get("config") or {}
    known = {**{k: row.get(k) for k in _FACTS}, **{k: config.get(k) for k in SIZES}}
    cell.facts |= {key: value for key, value in known.items() if value is not None}
    environment = row.get("environment") or {}
    if environment and environment not in cell.environments:
        cell.environments.append(environment)
    command = row.get("command") or environment.get("command")
    if command:
        cell.commands.setdefault(tuple(map(str, command)), str(environment.get("date") or ""))


def _identify(row: dict) -> Cell:
    """Returns the cell of a row, without measurements."""
    names = {name: row[name] for name in NAMES if name in row}
    if not names:
        raise ValueError("it has no implementation and no mode")
    if "implementation" in names:
        names = {"implementation": names["implementation"], "clipping": "none", **names}
    config = row.get("config") or {}
    skipped = {*NAMES, *_MACHINE, *SIZES, *_SAID_BY_NAMES} - {"clipping"}
    settings = {k: v for k, v in flat(config).items() if k not in skipped}
    if "batch_size" in row:
        settings["batch_size"] = row["batch_size"]
    if "num_processes" in row:
        settings["world_size"] = row["num_processes"]
    machine = {key: config[key] for key in _MACHINE if key in config}
    return Cell(names, settings, machine | {key: row[key] for key in _PLACE if key in row})


def flat(config: dict, prefix: str = "") -> dict[str, object]:
    """Flattens `{"model": {"d_ff": 8}}` to `{"model.d_ff": 8}`."""
    found = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _round(row: dict) -> Round:
    if row["status"] not in STATUSES:
        raise ValueError(f"status {row['status']!r}")
    times = {
        key: [float(ms) for ms in value]
        for key, value in row.items()
        if key.endswith("_ms") and not key.startswith("untimed") and isinstance(value, list)
    }
    for key, values in times.items():
        if not all(0 < ms < math.inf for ms in values):
            raise ValueError(f"{key} has a time that is not positive")
    peak = row.get("peak_memory_mb")
    if row.get("peak_memory_bytes") is not None:
        peak = row["peak_memory_bytes"] / _MIB
    return Round(
        row["round"], row["status"], row.get("reason"), {k: v for k, v in times.items() if v}, peak
    )


def beside(cells: Sequence[Cell], cell: Cell, name: str, value: str) -> Cell | None:
    """Returns the cell that differs from this one in one name only, if it has been measured.

    It did the same work: settings that both have are equal, and so is what a step trains on.
    """
    if cell.names.get(name, value) == value:
        return None
    wanted = {**cell.names, name: value}
    for other in cells:
        if (
            other.names == wanted
            and not differing(cell.settings, other.settings)
            and not differing(cell.machine, other.machine)
            and other.tokens_per_step == cell.tokens_per_step
            and other.status == OK
        ):
            return other
    return None


def differing(one: dict, other: dict) -> list[str]:
    """Returns the keys that both have, with different values."""
    return [key for key in one if key in other and one[key] != other[key]]


def ratio_beside(cell: Cell, other: Cell | None, metric: str = STEP) -> Ratio | None:
    """Returns the ratio of the cell's times to the other's, over the rounds that both have."""
    return other and ratio_of_rounds(cell.times(metric), other.times(metric))


def memory_beside(cell: Cell, other: Cell | None) -> float | None:
    """Returns the ratio of peaks of memory, where both are known."""
    if other is None or not (cell.peak_memory_mb and other.peak_memory_mb):
        return None
    return cell.peak_memory_mb / other.peak_memory_mb


def varying(cells: Sequence[Cell]) -> list[str]:
    """Returns the settings that differ between two cells that both have them."""
    seen: dict[str, object] = {}
    found = {}
    for cell in cells:
        for key, value in cell.settings.items():
            if seen.setdefault(key, value) != value:
                found[key] = True
    return list(found)
