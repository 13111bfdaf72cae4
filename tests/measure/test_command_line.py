"""Wrong options: one line that names the option, status 2, said by one process only."""

import argparse
import re

import pytest

from measure.command_line import Parser, check_folder, check_numbers, refuse


def made(speaks: bool) -> Parser:
    parser = Parser(prog="program", speaks=lambda: speaks)
    parser.add_argument("--steps", type=int)
    return parser


@pytest.mark.parametrize("speaks", [True, False])
def test_an_error_is_one_line_and_status_2(capsys, speaks):
    with pytest.raises(SystemExit) as stopped:
        made(speaks).parse_args(["--steps", "x"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error == ("program: argument --steps: invalid int value: 'x'\n" if speaks else "")


@pytest.mark.parametrize("speaks", [True, False])
def test_a_refusal_is_one_line(capsys, speaks):
    assert refuse("program", ValueError("two\n  lines"), speaks) == 2
    assert capsys.readouterr().err == ("program: two lines\n" if speaks else "")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": 0}, "--steps 0: give a positive number"),
        ({"steps": float("nan")}, "--steps nan: give"),
        ({"steps": float("inf")}, "--steps inf: give"),
        ({"steps": [3, -4]}, "--steps -4: give a positive"),
        ({"warmup_steps": -1}, "--warmup-steps -1: give 0 or more"),
        ({"warmup_steps": float("nan")}, "--warmup-steps nan: give 0"),
    ],
)
def test_a_number_out_of_range_is_named(values, said):
    options = argparse.Namespace(**{"steps": 1, "warmup_steps": 0, **values})
    with pytest.raises(ValueError, match=re.escape(said)):
        check_numbers(options, ["steps"], ["warmup_steps"])


def test_numbers_in_range_and_those_not_given():
    options = argparse.Namespace(steps=[1, 2], warmup_steps=0, rate=0.5, rounds=None)
    check_numbers(options, ["steps", "rate", "rounds"], ["warmup_steps"])


def test_a_folder_is_made_only_when_asked(tmp_path):
    check_folder("--output-dir", tmp_path / "a" / "b", create=False)
    assert not (tmp_path / "a").exists()
    check_folder("--output-dir", tmp_path / "a" / "b", create=True)
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output-dir .*file is a file, name a folder"):
        check_folder("--output-dir", tmp_path / "file" / "x", create=True)
