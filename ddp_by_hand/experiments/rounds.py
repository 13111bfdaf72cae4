"""Interleaved rounds of several variants on several batches: options, harness, results, table.

A cell is a variant on a row, such as a batch, in one round. Its results are a row of those that
`measure.runs` reads, so `python -m ddp_by_hand.measure.compare` takes the files:

| entry | |
| --- | --- |
| `row`, `variant`, `round` | which cell |
| `config` | what else it was measured with |
| `status`, `reason` | `ok`; or how it failed, and why, in one line |
| `step_ms`, `without_step_ms` | of each timed step: complete, and without noise and optimizer |
| `peak_memory_mb` | the peak of memory after the warm-up, in MiB |
"""

import json
import linecache
import re
import time
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_by_hand.lm.timing import StepCosts, release_memory
from ddp_by_hand.lm.watch import describe, status_of
from ddp_by_hand.measure import (
    ERROR,
    OK,
    SCHEMA_VERSION,
    describe_failure,
    environment,
    plan_rounds,
    summarize,
    write_atomically,
)
from ddp_by_hand.measure.command_line import BadInput
from ddp_by_hand.measure.options import is_writable, option, positive
from ddp_by_hand.measure.report_tables import wide_report
from ddp_by_hand.measure.runs import BASELINES, Cell, cells_of

BASELINE = "ordinary"
PER_LAYER = "_per_layer"  # behind a mode's name: clipping="per_layer"
FUSED_STEP = "_fused_step"  # the same: fused_step=True
_ENGINES = tuple(str(Path(find_spec(name).origin).parent) for name in ("dp_clipping", "opacus"))


@dataclass(frozen=True)
class RoundOptions:
    """Options of every program that measures in rounds."""

    rounds: int = option(3, "times each is built", check=positive)
    steps: int = option(5, "timed steps per round", check=positive)
    output: Path | None = option(None, "JSON of all samples (default: none)", check=is_writable)


class Row(NamedTuple):
    """A batch: samples (of a rank) and tokens per sample."""

    samples: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.samples}x{self.tokens}"


def row_of(text: str) -> Row:
    """Parses a row such as `8x1024`; raises ArgumentTypeError for anything else."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise ArgumentTypeError(f"{text!r} is not of the form 8x1024")
    return Row(*map(int, text.split("x")))


class RoundCell(NamedTuple):
    """A variant on a row, which is a batch or anything that is called by its `str`."""

    row: Any
    variant: str
    round: int

    def names(self) -> dict:
        return {"row": str(self.row), "variant": self.variant, "round": self.round}

    def __str__(self) -> str:
        return f"{self.variant} {self.row}, round {self.round + 1}"


def interleave(rows: Iterable[Any], variants: Sequence[str], rounds: int) -> list[RoundCell]:
    """Lists cells row by row, with a row's variants in interleaved rounds."""
    return [
        RoundCell(row, variant, number)
        for row in rows
        for number, variant in plan_rounds(variants, rounds, seed=0)
    ]


def run_rounds(
    cells: Iterable[RoundCell],
    measure: Callable[[RoundCell], dict],
    config: Callable[[RoundCell], dict],
    device: torch.device,
    output: Path | None = None,
    *,
    speaks: bool = True,
) -> list[dict]:
    """Measures the cells in their order, and frees their memory. Returns their results.

    A variant that has failed on a row would fail again: it is not tried in the next rounds.

    Args:
        config: what a cell is measured with, for its results.
        speaks: whether this process, one of several ranks, prints progress.
    """
    recorder, failed = Recorder(output), set()
    for cell in cells:
        if (str(cell.row), cell.variant) in failed:
            continue
        began = time.perf_counter()
        found = {**cell.names(), "config": config(cell)}
        found |= attempted(partial(measure, cell), device)
        if found["status"] != OK:
            failed.add((str(cell.row), cell.variant))
        seconds = time.perf_counter() - began
        recorder.add(found, f"{describe_cell(found)}, {seconds:.1f} s" if speaks else "")
    return recorder.cells


def run_program(
    options: RoundOptions,
    rows: Iterable[Any],
    variants: Sequence[str],
    measure: Callable[[RoundCell], dict],
    config: dict,
    device: torch.device,
    notes: Sequence[str] = (),
    speaks: bool = True,
) -> int:
    """Measures all variants on all rows, and prints the table and the notes.

    Returns the exit status: 1 if a cell failed.

    Args:
        speaks: whether this process, one of several ranks, prints and writes.
    """
    results = run_rounds(
        interleave(rows, variants, options.rounds), measure, lambda _: config, device,
        options.output if speaks else None, speaks=speaks,
    )  # fmt: skip
    if speaks:
        print(report(results), *notes, sep="\n")
    return int(any(cell["status"] == ERROR for cell in results))


def device_for(model: str) -> torch.device:
    """Returns the GPU, or the CPU for a rehearsal. Raises BadInput for a larger model there."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if model != "tiny":
        raise BadInput(f"{model} needs a CUDA device: --model tiny rehearses on a CPU")
    return torch.device("cpu")


def attempted(
    measure: Callable[[], dict], device: torch.device, passing: type[Exception] | tuple = ()
) -> dict:
    """Returns what is measured with its status, or how and why it failed; frees its memory.

    Errors of the kinds `passing` are raised; so are all where other ranks may wait for this one.
    """
    try:
        found = {"status": OK, **measure()}
    except passing:
        raise
    except Exception as error:
        if torch.distributed.is_initialized():
            raise
        found = failure_of(error)
    release_memory(device)
    return found


def failure_of(error: Exception) -> dict[str, str]:
    """Returns the status of a cell and its reason: what an engine refused, or what was raised.

    An engine refuses by a `raise` of its own; anything else is a crash below or inside it.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    is_refusal = last.filename.startswith(_ENGINES) and line.startswith("raise")
    verb = "refused" if is_refusal else "raised"
    return {"status": status_of(error), "reason": f"{verb}: {describe(error)}"}


def costs_of(costs: StepCosts) -> dict:
    """Returns the costs that a cell records."""
    return {
        "step_ms": costs.step_ms,
        "without_step_ms": costs.backward_ms,
        "peak_memory_mb": costs.peak_mb or 0,
    }


class Recorder:
    """All cells that were measured so far, in a file too.

    `common` stands in the file beside them.
    """

    def __init__(self, output: Path | None, **common: Any):
        self.cells: list[dict] = []
        self._output = output
        self._common = {
            "schema_version": SCHEMA_VERSION, "environment": environment(), **common,
        }  # fmt: skip

    @property
    def results(self) -> dict:
        return {**self._common, "cells": self.cells}

    def add(self, cell: dict, line: str) -> None:
        """Adds a cell to the results, and prints `line` as progress."""
        self.cells.append(cell)
        if self._output:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._output, json.dumps(self.results, indent=1))
        if line:
            print(line, flush=True)


def describe_cell(cell: dict) -> str:
    """Returns one line of progress."""
    name = f"{cell['row']} {cell['variant']} round {cell['round'] + 1}"
    if cell["status"] != OK:
        return f"{name}: {describe_failure(cell)}"
    return f"{name}: {summarize(cell['step_ms']).median:.1f} ms, {cell['peak_memory_mb']:,.0f} MiB"


def report(results: Sequence[dict], more: Callable[[Cell], dict] | None = None) -> str:
    """Formats all cells; `more` returns further entries of a cell's line."""
    return wide_report(ordered(cells_of(results)), more)


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Sorts by row, the baseline first, otherwise as they came."""
    rows = list(dict.fromkeys(cell.names["row"] for cell in cells))
    baselines = BASELINES["variant"]
    return sorted(
        cells, key=lambda c: (rows.index(c.names["row"]), c.names["variant"] not in baselines)
    )
