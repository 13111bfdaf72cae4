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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps 0: give a positive number"),
        (["--steps", "3", "-4"], "--steps -4: give a positive number"),
        (["--steps", "2.5"], "argument --steps: invalid int value: '2.5'"),
        (["--rate", "-1"], "--rate -1.0: give 0 or more"),
        (["--rate", "nan"], "--rate nan: give 0 or more"),
        (["--rate", "inf"], "--rate inf: give 0 or more"),
        (["--modes", "c"], "argument --modes: invalid choice: 'c' (choose from "),
        (["--fast", "--pair", "p", "q"], "--fast: not with --pair"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(capsys, words, said):
    with pytest.raises(SystemExit) as stopped:
        parsed("x", *words)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith(f"program: {said}")
    assert error.count("\n") == 1


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
