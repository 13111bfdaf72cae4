"""Interleaved rounds of several variants on several batches, in one results format.

A cell is a variant on a row, such as a batch, in one round. Its results are a row of those that
`measure.runs` reads, so `python -m measure.compare` takes the files:

| entry | |
| --- | --- |
| `row`, `variant`, `round` | which cell |
| `config` | what else it was measured with |
| `status`, `reason` | `ok`; or how it failed, and why, in one line |
| `step_ms`, `without_step_ms` | of each timed step: complete, and without noise and optimizer |
| `peak_memory_mb` | the peak of memory after the warm-up, in MiB |
"""

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.timing import StepCosts
from lm.watch import describe, status_of
from measure import OK, SCHEMA_VERSION, environment, plan_rounds, summarize, write_atomically

BASELINE = "ordinary"
PER_LAYER = "_per_layer"  # behind a mode's name: clipping="per_layer"


class Row(NamedTuple):
    """A batch: samples (of a rank) and tokens per sample."""

    samples: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.samples}x{self.tokens}"


def row_of(text: str) -> Row:
    """Parses a row such as `8x1024`."""
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


def attempt(measure: Callable[..., dict], *arguments: Any) -> dict:
    """Returns the result of `measure`, or its failure, so that other cells can be measured."""
    try:
        return {"status": OK, **measure(*arguments)}
    except Exception as error:
        return {"status": status_of(error), "reason": describe(error)}


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
        return f"{name}: {cell['status']}: {cell['reason']}"
    return f"{name}: {summarize(cell['step_ms']).median:.1f} ms, {cell['peak_memory_mb']:,.0f} MiB"
