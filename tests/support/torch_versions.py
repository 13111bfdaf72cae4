"""Runs the tests with versions of PyTorch, each in an environment of its own; prints a table.

    python -m tests.support.torch_versions 2.11.0 2.15.0
    python -m tests.support.torch_versions 2.15.0 --keep /tmp/torch -- tests/ddp -m "not slow"

An environment has the versions of constraints.txt, but this torch, the triton that this torch
requires, and for torch 2.11 an older NumPy (`BESIDE`). It takes some minutes and 6 GB, and is
removed. What follows `--` is for pytest; without it all tests but the slow ones run, in as many
processes as by `make test`. The exit status is 0 if no test failed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAST = ["-m", "not slow", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
BESIDE = {"2.11": "numpy<2.4"}  # Triton 3.6's interpreter, which runs kernels here, needs it
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
LAST = re.compile(r"(=+ )?\d+ (passed|failed|errors?|skipped|deselected).* in [\d.]+s")


@dataclass(frozen=True)
class Outcome:
    """How the tests ended: numbers by what pytest calls them, and ids of what failed."""

    counts: dict[str, int]
    failed: list[str]
    status: int

    def row(self, version: str) -> str:
        """Returns the line of the table, and a line for each test that failed."""
        errors = self.counts.get("error", 0) + self.counts.get("errors", 0)
        numbers = (
            self.counts.get("passed", 0),
            self.counts.get("failed", 0) + errors,
            self.counts.get("skipped", 0),
        )
        line = f"{version:16}" + "".join(f"{number:>10,}" for number in numbers)
        if not self.counts:
            line += f"   pytest ended with status {self.status} before it counted"
        return "\n    ".join([line, *self.failed])


HEADER = f"{'torch':16}{'passed':>10}{'failed':>10}{'skipped':>10}"


def pins_of(version: str) -> list[str]:
    """Returns the lines of constraints.txt that hold with this torch."""
    ours, without = [], ("torch=", "torchvision=", "triton=")
    release = ".".join(version.split(".")[:2])
    if release in BESIDE:
        ours, without = [BESIDE[release]], (*without, "numpy=")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [x for x in lines if not x.startswith(without)] + ours


def python_of(folder: Path, version: str) -> Path:
    """Returns the Python of a new environment, or of the one that an earlier call has kept."""
    place = folder / version
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        venv.create(place, with_pip=True, clear=True)
        pinned = place / "constraints.txt"
        pinned.write_text("\n".join(pins_of(version)))
        pip = [str(python), "-m", "pip", "install", "-q", "-c", str(pinned), f"torch=={version}"]
        subprocess.run([*pip, "setuptools>=77", "-e", f"{ROOT}[test]"], check=True)
        ready.touch()
    return python


def tested(python: Path, arguments: Sequence[str]) -> Outcome:
    """Runs pytest, printing what it prints."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return outcome(lines, process.returncode)


def outcome(lines: Iterable[str], status: int) -> Outcome:
    """Reads pytest's last lines: `FAILED tests/test_x.py::test_y - why`, then `1 failed in 2s`."""
    failed, counts = [], {}
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            failed.append(line.strip().partition(" ")[2].partition(" - ")[0])
        elif LAST.match(line):
            counts = {name: int(number) for number, name in COUNT.findall(line)}
    return Outcome(counts, failed, status)


def main(arguments: Sequence[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m tests.support.torch_versions VERSION ... [--keep FOLDER] [-- PYTEST ...]",
    )  # fmt: skip
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, as pip knows it")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER",
        help="keep the environments in this folder, and use those that are there",
    )  # fmt: skip
    options = parser.parse_args(arguments[:end])
    rows, is_right = [HEADER], True
    for version in options.versions:
        kept = None if options.keep is None else nullcontext(options.keep.resolve())
        with kept or tempfile.TemporaryDirectory() as folder:
            found = tested(python_of(Path(folder), version), arguments[end + 1 :] or FAST)
        rows.append(found.row(version))
        is_right &= found.status == 0
    print("", *rows, sep="\n")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
