"""Runs a program in processes forked from one that has imported PyTorch: most of what starts take.

The program and each of its ranks begin at the script's first line, as new processes do, with
arguments, variables and session of their own. What differs is that a module that is there is not
imported again, so that some tests start programs as users do.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch


def run_forked(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Runs `[sys.executable, script, *arguments]` to its end; ranks of `lm.launch` are forked too.

    `-m` and the name of a module may stand for the script.

    Raises:
        subprocess.TimeoutExpired: after so many seconds.
        AssertionError: when processes of the program are left.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_main, args=(command[1:], env, str(cwd), out, err))
        process.start()
        process.join(timeout)
        left = session_of(process.pid)
        for number in left:
            os.kill(number, 9)
        if process.exitcode is None:
            raise subprocess.TimeoutExpired(command, timeout)
        assert not left, left
        return subprocess.CompletedProcess(
            command, process.exitcode, out.read_text(), err.read_text()
        )


def session_of(leader: int) -> list[int]:
    """Returns the processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, *_, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # gone
            continue
        if int(session) == leader and state != "Z":
            found.append(int(folder.name))
    return found


def _main(arguments: Sequence[str], env: Mapping[str, str], cwd: str, out: Path, err: Path) -> None:
    os.setsid()
    os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    _environ(env)
    import_module("torch._dynamo")  # which each rank would

    with patch("ddp_by_hand.lm.launch.subprocess", SimpleNamespace(Popen=_Rank)):
        _begin(arguments, env)


def _environ(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _begin(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    _environ(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv, sys.orig_argv = [*arguments], [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


class _Rank:
    """Stands in for the `subprocess.Popen` of a rank."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], preexec_fn: Callable):
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._run, args=(command[1:], env, preexec_fn))
        self._process.start()
        self.terminate, self.kill = self._process.terminate, self._process.kill
        self.wait, self.pid = self._process.join, self._process.pid

    @staticmethod
    def _run(arguments: Sequence[str], env: Mapping[str, str], preexec_fn: Callable) -> None:
        preexec_fn()
        _begin(arguments, env)

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode
