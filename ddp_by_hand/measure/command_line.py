"""Command lines: a wrong option is answered by one line on stderr and exit status 2.

Of several ranks that got the same options the first one of each host prints it.
"""

import argparse
import difflib
import errno
import functools
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ddp_by_hand.lm.interrupt import INTERRUPTED
from ddp_by_hand.lm.programs import is_first_of_host
from ddp_by_hand.measure.extras import MissingExtra

BAD_INPUT = 2
UNWRITABLE = 1
SECONDS_TO_PRINT = 10.0  # that the first rank of a host has for it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
NOBODY_READS = 141  # and for `| head`, 128 + SIGPIPE


class Parser(argparse.ArgumentParser):
    """An argument parser that prints no usage text before an error; `--help` shows it."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ")
        if words != message:
            known = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(words.partition(" ")[0].partition("=")[0], known, n=1)
            message += f" (did you mean {near[0]}?)" if near else "; --help lists them"
        self.exit(refuse(self.prog, message))


class BadInput(Exception):
    """Raised for what a user gave and cannot be; its message says what to give instead."""


@contextmanager
def bad_input() -> Iterator[None]:
    """Raises BadInput in place of ValueError and OSError, where they are about the options.

    It is a context manager, and `@bad_input()` decorates a function.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # no bad input: see `ending_quietly`
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


def ending_quietly(main: Callable[..., int]) -> Callable[..., int]:
    """Decorates a program's `main`, so that it ends without a traceback.

    Ctrl-C prints `interrupted` and exits with status 130. Output without a reader (`| head`) ends
    it silently with status 141. Output that cannot be written (a full disk) ends it with one line
    and status 1, a package that is not installed (`extras`) with one line and status 2.
    """

    @functools.wraps(main)
    def run(*arguments: Any, **named: Any) -> int:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed, as by `>&-`
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if isinstance(sys.stdout, TextIOWrapper):  # an encoding may lack ε and σ
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it
        try:
            try:
                return main(*arguments, **named)
            finally:
                sys.stdout.flush()  # here and not at exit, where it cannot be caught
        except MissingExtra as error:
            if is_first_of_host():
                print(error, file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            if is_first_of_host():
                print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            if not _close_unread():
                raise  # another pipe than the output
            return NOBODY_READS
        except OSError as error:
            if error.filename is not None or error.errno not in _FULL:
                raise  # another file than the output
            _discard(sys.stdout)
            if is_first_of_host():
                print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
            return UNWRITABLE

    return run


def _close_unread() -> bool:
    """Returns whether stdout or stderr has no reader; discards what is still written there."""
    found = False
    for stream in (sys.stdout, sys.stderr):
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors are always reported
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            found = True
            _discard(stream)
    return found


def _discard(stream: TextIO) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def refuse(program: str, error: Exception | str) -> int:
    """Prints the error on one line of stderr, on the first rank of a host; returns the exit status.

    Other ranks wait for it: a launcher ends all ranks with the first one that fails.
    """
    if is_first_of_host():
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
    else:
        time.sleep(SECONDS_TO_PRINT)
    return BAD_INPUT


def check_folder(name: str, folder: Path, create: bool) -> None:
    """Checks that files can be written in a folder.

    `name` is the option's; `create` makes the folder.

    It tries to write, since permissions are not all that can prevent it (a
    read-only file system, /proc). Without `create` it is tried where the folder would begin, under
    a name of its own: several processes may try at the same time.

    Raises:
        ValueError: in one line, if not.
    """
    try:
        paths = (folder, *folder.absolute().parents)
        existing = next(path for path in paths if path.exists() or path.is_symlink())
        if existing.is_symlink() and not existing.exists():
            raise ValueError(f"{name} {folder}: {existing} is a link to nothing, name a folder")
        if not existing.is_dir():
            raise ValueError(f"{name} {folder}: {existing} is a file, name a folder")
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder if create else existing):
            pass
    except OSError as error:
        raise ValueError(
            f"{name} {folder}: cannot be written to ({error.strerror}), name another folder"
        ) from error


def check_file(name: str, path: Path) -> None:
    """Checks that a file can be written.

    `name` is the option's; missing folders may be made.

    Raises:
        ValueError: in one line, if not.
    """
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise ValueError(
            f"{name} {path}: cannot be written to ({error.strerror}), name another file"
        ) from error
    if is_folder:
        raise ValueError(f"{name} {path}: is a folder, name a file")
    check_folder(f"{name} {path}, in", path.absolute().parent, create=False)
