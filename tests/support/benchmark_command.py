"""Start `benchmark_ddp.py` as a user does, on a model that is as small as it gets."""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from ddp_by_hand.bench.options import PROGRAM, Options
from ddp_by_hand.measure.options import parse_options
from tests.support.forked import Forked

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "benchmark_ddp.py")
PLUGINS = "tests/support/plugins.py"
TINY = [
    *("--device", "cpu", "--timeout", "120"),
    *("--d-model", "16", "--num-layers", "2", "--num-heads", "2", "--d-ff", "32"),
    *("--context-length", "16", "--batch-size", "2"),
    *("--steps-per-epoch", "2", "--rounds", "2"),
]
PROGRESS = re.compile(r"\d+ of \d+, after [\w ]+: [\w:]+ \(")  # on stderr, without a terminal
LIMIT_S = 240
TOKEN = "BENCHMARK_TEST"


def parse(arguments: list[str]) -> Options:
    return parse_options(Options, arguments, prog=PROGRAM)


def launch(*arguments: str | Path, prefix=(), launcher=(), **options) -> subprocess.Popen:
    """Start a tiny run; all its processes carry a mark, by which `survivors` finds them."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    variables = {"PYTHONPATH": str(ROOT), **os.environ, **options.pop("env", {})}
    process = subprocess.Popen(
        [*prefix, sys.executable, *launcher, SCRIPT, *TINY, *map(str, arguments)],
        cwd=options.pop("cwd", ROOT),
        env={**variables, TOKEN: (token := uuid.uuid4().hex)},
        **options,
    )
    process.token = token
    return process


def benchmark(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    """A tiny run to its end."""
    return finish(launch(*arguments, **options))


def launch_forked(
    *arguments: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None,
    terminal: str | None = None,
) -> Forked:  # fmt: skip
    """Start a tiny run in processes that need not import PyTorch."""
    command = [sys.executable, SCRIPT, *TINY, *map(str, arguments)]
    return Forked(command, cwd, {"PYTHONPATH": str(ROOT), **os.environ, **(env or {})}, terminal)


def forked_benchmark(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    """A tiny run to its end, in such processes."""
    return launch_forked(*arguments, **options).finish(LIMIT_S)


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Wait; nothing of the run may be left afterwards."""
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        for number in survivors(process):
            os.kill(number, 9)
        raise
    assert not wait_until_gone(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def survivors(process: subprocess.Popen) -> list[int]:
    """Processes of this run that are still there."""
    mark = f"{TOKEN}={process.token}".encode()
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _carries(p, mark)]


def _carries(folder: Path, mark: bytes) -> bool:
    try:
        return mark in (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or a zombie
        return False


def wait_until_gone(process: subprocess.Popen, limit_s: float = 10) -> list[int]:
    """What is left after some seconds."""
    deadline = time.monotonic() + limit_s
    while (left := survivors(process)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def wait_for_rows(folder: Path, count: int) -> None:
    """Until the run has recorded so many rows: it is in the middle of its work."""
    path, deadline = folder / "results.jsonl", time.monotonic() + LIMIT_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"no {count} rows in {path}"
        time.sleep(0.02)


def table_of(output: str) -> dict[str, str]:
    """Name -> row of the printed table."""
    body = re.search(r"^-+  .*\n((?:.+\n)+)\n", output, re.MULTILINE)
    assert body, output
    return {line.split()[0]: line for line in body[1].splitlines()}
