#!/usr/bin/env python3
"""Compares how many examples of a unit a step takes, at equal (ε, δ): all of them, or m.

    python -m ddp_by_hand.experiments.examples_per_step  three minutes on one core
    python -m ddp_by_hand.experiments.examples_per_step --epsilons 8 --drawn 1 --seeds 1

The data are those of `experiments.correlated_noise`. A unit of privacy has 1 to `--most` pictures:
its size is most^u, with u uniform. A step has `--rows` pictures. So a batch of units with all of
their pictures, filled up to `--most`, has `--most` / m times fewer units than one with m of each.
All have the same number of steps, and the learning rate that is best on other pictures.
"""

import sys
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from ddp_by_hand.experiments.correlated_noise import (
    ComparisonOptions,
    Pictures,
    Split,
    accuracy,
    compare,
    noise_multiplier,
    shown,
    trained,
    tuned,
)
from ddp_by_hand.measure import Column
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import option, positive, program

COLUMNS = (
    Column("ε", format="g"), Column("examples of a unit"), Column("units of a batch", format="d"),
    Column("σ", format=".3f"), Column("rate", format="g"), Column("accuracy, %"),
)  # fmt: skip


# fmt: off
@dataclass(frozen=True)
class Options(ComparisonOptions):
    drawn: tuple[int, ...] = option((1, 4, 16), "m, each a row", check=positive)
    most: int = option(64, "pictures of a unit at most, which divide --rows", check=positive)
    rows: int = option(512, "pictures of a step, with those that fill up", check=positive)
    steps: int = option(128, "of each run", check=positive)
    learning_rates: tuple[float, ...] = option((2.0, 4.0, 8.0, 16.0, 32.0), "that are tried",
        check=positive)
# fmt: on

    def __post_init__(self) -> None:
        if self.most < 2:
            raise ValueError("--most 1: each unit would be one picture: give 2 or more")
        for name, each in (("--most", self.most), *(("--drawn", m) for m in self.drawn)):
            if self.rows % each:
                raise ValueError(f"--rows {self.rows}: give a multiple of {name} {each}")


@program("ddp_by_hand.experiments.examples_per_step", Options, needs=["matplotlib"])
@bad_input()
def main(options: Options) -> int:
    ids = units_of_pictures(options)
    compare(options, COLUMNS, (*options.drawn, None), partial(measured, options, ids))
    return 0


def units_of_pictures(options: Options) -> list[int]:
    """Returns the unit of each picture."""
    draw, ids = torch.Generator().manual_seed(7), []
    for unit in range(options.pictures):
        size = int(options.most ** torch.rand((), generator=draw).item())
        ids += [unit] * size
        if len(ids) >= options.pictures:
            break
    return ids[: options.pictures]


def measured(
    options: Options, ids: list[int], split: Split, epsilon: float, drawn: int | None
) -> dict[str, Any]:
    """Returns the row of a table: σ, learning rate, accuracy with its standard deviation."""
    each = drawn or options.most
    method: dict[str, Any] = {"unit_ids": ids, "steps": options.steps}
    method |= {"examples_per_unit": each} if drawn is None else {"examples_per_step": drawn}
    method["sample_rate"] = (options.rows // each) / (ids[-1] + 1)
    sigma = noise_multiplier(options, split, options.rows, epsilon, **method)

    def train(rate: float, seed: int, pictures: Pictures) -> tuple[float]:
        """Returns the accuracy of the mean of one run's parameters over its second half."""
        steps = trained(split, rate, options.rows, seed, sigma, **method)
        return (accuracy(sum(islice(steps, options.steps // 2, None)), pictures),)

    rate, runs, _ = tuned(options, split, train)
    return {
        "ε": epsilon, "examples of a unit": f"all, at most {each}" if drawn is None else str(drawn),
        "units of a batch": options.rows // each, "σ": sigma, "rate": rate,
        "accuracy, %": shown([found for (found,) in runs]),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
