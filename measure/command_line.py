"""What command lines have in common: a wrong option is answered by one line and exit status 2."""

import argparse
import errno
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """argparse without the usage text before an error; `--help` shows it.

    `speaks` says whether this process, one of several that got the same options, is to print it.
    """

    def __init__(self, *, speaks: Callable[[], bool] = lambda: True, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._speaks = speaks

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n" if self._speaks() else None)


def refuse(program: str, error: Exception | str, speaks: bool = True) -> int:
    """Print the error on one line of stderr; the exit status."""
    if speaks:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
    return BAD_INPUT


def option(name: str) -> str:
    """`seq_length` is what a program calls it; the user knows it as `--seq-length`."""
    return f"--{name.replace('_', '-')}"


def check_numbers(
    options: argparse.Namespace, positive: Iterable[str], not_negative: Iterable[str] = ()
) -> None:
    """Check options by name, each number of those that take several; None is not given.

    Raises:
        ValueError: one is not finite, or too small; it names the option and what to give.
    """
    for name in positive:
        for value in _numbers(options, name):
            if not 0 < value < math.inf:
                raise ValueError(f"{option(name)} {value}: give a positive number")
    for name in not_negative:
        for value in _numbers(options, name):
            if not 0 <= value < math.inf:
                raise ValueError(f"{option(name)} {value}: give 0 or more")


def _numbers(options: argparse.Namespace, name: str) -> list:
    value = getattr(options, name)
    return value if isinstance(value, list) else [] if value is None else [value]


def check_folder(name: str, folder: Path, create: bool) -> None:
    """Can files be written there? `name` is that of the option; `create` makes the folder.

    Raises:
        ValueError: in one line, if not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{name} {folder}: {existing} is a file, name a folder")
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder if create else existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{name} {folder}: cannot be written to ({error.strerror}), name another folder"
        ) from error
