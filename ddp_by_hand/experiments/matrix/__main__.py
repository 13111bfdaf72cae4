#!/usr/bin/env python3
"""Finds out which architectures of transformers, peft, torchvision and timm train privately.

Each row is a tiny configuration in its default settings. A private step is compared with one
backward per sample, and two steps run; where that is refused, changes are tried. One line per row:

    works      as it is
    changed    after the change that is named
    refused    with the first sentence of the message
    failed     raised by the library or the network, or not exact; exit status 1
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch

from ddp_by_hand.experiments.matrix import adapters, images, page, senses, text
from ddp_by_hand.experiments.matrix.trial import FAILED, Outcome, Row, try_row
from ddp_by_hand.measure.environment import environment
from ddp_by_hand.measure.options import is_writable, option, program

FAMILIES: dict[str, Callable[[], Iterable[Row]]] = {
    "transformers": lambda: chain(text.rows(), senses.rows()),
    "peft": adapters.rows,
    "torchvision": images.rows_of_torchvision,
    "timm": images.rows_of_timm,
}
NEEDS = {"peft": ("peft", "transformers")}
EXAMPLES = """\
examples:
  python -m ddp_by_hand.experiments.matrix --families transformers --names gpt2 llama
      two rows
  python -m ddp_by_hand.experiments.matrix --output docs/matrix.md
      every row of the libraries that are installed, and the page
"""


# fmt: off
@dataclass(frozen=True)
class Options:
    families: tuple[str, ...] = option(tuple(FAMILIES), choices=tuple(FAMILIES), unique=True,
        metavar="NAME", help=(
        f"libraries: any of {', '.join(FAMILIES)}; one that is not installed is left out "
        "(default: all)"))
    names: tuple[str, ...] | None = option(None, metavar="NAME",
        help="only rows of these names (default: all)")
    output: Path | None = option(None, metavar="FILE", check=is_writable, help=(
        "page in which the sections of these libraries are replaced (default: none is written)"))

    def __post_init__(self) -> None:
        if self.output is not None and self.names is not None:
            raise ValueError("--output is for whole libraries: leave out --names")
# fmt: on


def run(options: Options) -> list[Outcome]:
    """Tries each row of the options, and prints a line of each."""
    found = []
    for family in options.families:
        missing = [name for name in NEEDS.get(family, (family,)) if find_spec(name) is None]
        if missing:
            print(f"{family}: left out, {missing[0]} is not installed: pip install {missing[0]}")
            continue
        if find_spec("transformers") is not None:
            import transformers

            transformers.logging.set_verbosity_error()
        outcomes = []
        for row in FAMILIES[family]():
            if options.names is None or row.name in options.names:
                outcomes.append(try_row(row))
                status, words = outcomes[-1].status, outcomes[-1].words
                print(
                    f"{family}  {row.section}  {row.name}  {status}  {words}".rstrip(), flush=True
                )
        if options.output is not None:
            before = options.output.read_text() if options.output.exists() else ""
            options.output.write_text(page.written(before, family, outcomes, measured(family)))
        found += outcomes
    return found


def measured(family: str) -> str:
    """Returns the line that says with which versions and when."""
    names = dict.fromkeys([*NEEDS.get(family, (family,)), "torch"])
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"({versions}, {environment()['date'][:10]}.)"


@program("ddp_by_hand.experiments.matrix", Options, epilog=EXAMPLES)
def main(options: Options) -> int:
    """Tries the rows. Returns 0, 1 (a row failed) or 2 (no row is of these names)."""
    torch.set_num_threads(1)  # the networks are tiny
    warnings.simplefilter("ignore")
    outcomes = run(options)
    unknown = set(options.names or ()) - {outcome.row.name for outcome in outcomes}
    if outcomes and unknown:
        print(f"no row of the installed libraries is named {', '.join(sorted(unknown))}")
        return 2
    if not outcomes:
        print("no row has such a name" if options.names else "no library is installed")
        return 2
    return int(any(outcome.status == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
