"""Wrong options: one line that names the option, status 2, said by one process only."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_by_hand.measure.command_line import (
    Parser,
    check_file,
    check_folder,
    ending_quietly,
    refuse,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[True, False])
def speaks(request, monkeypatch) -> bool:
    """Whether this process is the first one of its host, as a launcher says."""
    environment = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}
    for name, value in [] if request.param else environment.items():
        monkeypatch.setenv(name, value)
    return request.param


def made() -> Parser:
    parser = Parser(prog="program")
    parser.add_argument("--steps", type=int)
    return parser


def test_an_error_a_refusal_and_an_interruption_are_one_line_of_the_first_process(
    capsys, monkeypatch, speaks
):
    """Others wait until it has said it, since a launcher ends all with the first that fails."""
    waits: list[float] = []
    monkeypatch.setattr("ddp_by_hand.measure.command_line.time.sleep", waits.append)

    @ending_quietly
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        made().parse_args(["--steps", "x"])
    assert stopped.value.code == 2
    assert refuse("program", ValueError("two\n  lines")) == 2
    assert interrupted() == 130
    lines = "program: argument --steps: invalid int value: 'x'\nprogram: two lines\ninterrupted\n"
    assert capsys.readouterr().err == (lines if speaks else "")
    assert len(waits) == (0 if speaks else 2)


@pytest.mark.parametrize(
    ("word", "said"), [("--setps=3", " (did you mean --steps?)"), ("--x", "; --help lists them")]
)
def test_an_unknown_option_shows_the_nearest(capsys, word, said):
    with pytest.raises(SystemExit):
        made().parse_args([word])
    assert capsys.readouterr().err == f"program: unrecognized arguments: {word}{said}\n"


def test_folders_are_made_when_asked_and_not_below_a_file(tmp_path):
    check_folder("--output-dir", tmp_path / "a" / "b", create=False)
    assert not (tmp_path / "a").exists()
    check_folder("--output-dir", tmp_path / "a" / "b", create=True)
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output-dir .*file is a file, name a folder"):
        check_folder("--output-dir", tmp_path / "file" / "x", create=True)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"--output-dir .*link is a link to nothing"):
        check_folder("--output-dir", tmp_path / "link" / "x", create=True)
    with pytest.raises(ValueError, match=r"--output x+: cannot be written to \(File name too long"):
        check_file("--output", Path("x" * 300))
    with pytest.raises(ValueError, match=r"--output .*: is a folder, name a file"):
        check_file("--output", tmp_path)


@pytest.mark.parametrize(
    ("flags", "count", "work"),
    [
        ([], 1, "return 0"), (["-u"], 100_000, "return 0"), ([], 1, "raise BadInput('wrong')"),
        ([], 100_000, "raise SystemExit(0)"),
    ],
)  # fmt: skip
def test_output_that_nobody_reads_ends_it_quietly(monkeypatch, flags, count, work):
    """Of one line that is written at the end, and of many that are written on the way."""
    text = f'''
"""Counts."""
import sys
from dataclasses import dataclass
from ddp_by_hand.measure.command_line import BadInput, bad_input
from ddp_by_hand.measure.options import program

@dataclass
class Options:
    pass

@program("x", Options)
def main(options):
    with bad_input():
        for number in range({count}):
            print(number)
    {work}

sys.exit(main())
'''
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with subprocess.Popen([sys.executable, *flags, "-c", text], text=True, cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() in ("", "x: wrong\n")


def test_closed_outputs_are_as_dev_null(monkeypatch):
    """As a shell closes them by `>&- 2>&-`."""
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, None)

    @ending_quietly
    def main() -> int:
        print("a line")
        print("another", file=sys.stderr)
        return 3

    assert main() == 3


def test_an_encoding_without_a_letter(monkeypatch):
    """As of a terminal that is not of UTF-8."""
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))

    @ending_quietly
    def main() -> int:
        print("ε 8")
        return 0

    assert main() == 0
    assert buffer.getvalue() == b"\\u03b5 8\n"


def test_another_broken_pipe_is_no_quiet_end(capfd):
    @ending_quietly
    def main() -> int:
        raise BrokenPipeError

    with capfd.disabled(), pytest.raises(BrokenPipeError):
        main()
