"""Options from dataclass fields: types, defaults in the help, checks, and the way back to words."""

from argparse import SUPPRESS
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from ddp_by_hand.measure.options import (
    as_arguments,
    not_negative,
    option,
    parse_options,
    parser_of,
    positive,
    shared_values,
)


class Row(NamedTuple):
    samples: int
    tokens: int

    def __str__(self):
        return f"{self.samples}x{self.tokens}"


def row_of(text: str) -> Row:
    return Row(*map(int, text.split("x")))


@dataclass(frozen=True)
class Options:
    folder: Path = option(metavar="FOLDER", help="whose results")
    steps: tuple[int, ...] = option((1, 2), "counts", group="numbers", metavar="N", check=positive)
    rate: float = option(1.0, "a step", check=not_negative)
    modes: tuple[str, ...] | None = option(
        None, "(default: all)", choices=("a", "b"), unique=True, group="others"
    )
    pair: tuple[Path, Path] | None = option(None, "(default: none)")
    fast: bool = option(False, "hurry (default: off)")
    rows: tuple[Row, ...] = option((Row(8, 16), Row(1, 2)), "batches", type=row_of)
    hidden: int = option(0, SUPPRESS)
    typed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.fast and self.pair:
            raise ValueError("--fast: not with --pair")


@dataclass(frozen=True)
class Part:
    steps: tuple[int, ...]
    seconds: float
    more: int = 3


def parsed(*arguments: str) -> Options:
    return parse_options(Options, arguments, prog="program")


def test_values_have_the_types_of_their_annotations():
    assert parsed("x") == Options(Path("x"))
    words = "--steps 3 4 --rate 2 --modes b a b --pair p q --hidden 5"
    found = parsed("x", *words.split(" "))
    assert found == Options(Path("x"), (3, 4), 2.0, ("b", "a"), (Path("p"), Path("q")), hidden=5)
    assert parsed("x", "--fast").fast
    rows = parsed("x", "--rows", "3x4")
    assert rows.rows == (Row(3, 4),)
    assert parsed(*as_arguments(rows)) == rows


def test_help_has_groups_and_defaults(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "numbers: --steps N [N ...] counts (default: 1 2) --rate" in text
    assert "a step (default: 1) others: --modes" in text
    assert "hurry (default: off)" in text
    assert "batches (default: 8x16 1x2)" in text
    assert "hidden" not in text


def test_words_of_options_make_them_again():
    options = replace(parsed("x", "--modes", "b", "--fast", "--rate", "1e-5"), steps=(7,))
    words = as_arguments(options)
    assert words == ["x", "--steps", "7", "--rate", "1e-05", "--modes", "b", "--fast"]
    assert parsed(*words) == options
    assert as_arguments(parsed("x")) == ["x"]
    assert shared_values(parsed("x"), Part, seconds=2.0) == Part((1, 2), 2.0)
    flags = [action.option_strings for action in parser_of(Options)._actions]
    assert ["--rate"] in flags
    assert not any("typed" in "".join(names) for names in flags)
