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
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from tests.support.servers import server_for


class Forked:
    """A program that has begun: `[sys.executable, script, *arguments]`, in a session of its own.

    `-m` and the name of a module may stand for the script. Ranks of `lm.launch` are forked too.

    Args:
        terminal: the name of one to write stderr to.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], terminal: str | None = None
    ) -> None:
        self._command, self._folder = command, tempfile.TemporaryDirectory()
        self._out, self._err = Path(self._folder.name, "out"), Path(self._folder.name, "err")
        context = multiprocessing.get_context("forkserver")
        arguments = command[1:], env, str(cwd), self._out, terminal or self._err
        self._process = context.Process(target=_main, args=arguments)
        with server_for(env):
            self._process.start()
        self.pid = self._process.pid

    def finish(self, timeout: float) -> subprocess.CompletedProcess:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: after so many seconds.
            AssertionError: when processes of the program are left.
        """
        with self._folder:
            self._process.join(timeout)
            left = session_of(self.pid)
            for number in left:
                os.kill(number, 9)
            status = self._process.exitcode
            if status is None:
                raise subprocess.TimeoutExpired(self._command, timeout)
            assert not left, left
            out, err = (
                path.read_text() if path.exists() else "" for path in (self._out, self._err)
            )
            return subprocess.CompletedProcess(self._command, status, out, err)


def run_forked(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Runs a program of `Forked` to its end."""
    return Forked(command, cwd, env).finish(timeout)


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


def _main(
    arguments: Sequence[str], env: Mapping[str, str], cwd: str, out: Path, err: Path | str
) -> None:
    os.setsid()
    os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    _environ(env)
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
