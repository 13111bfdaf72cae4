"""Writes files that are whole even if the process is killed: replacement, and JSON lines.

Two ways of writing, for two kinds of file:

- a file that is written as a whole (a picture, a summary) is prepared beside its final name and
  renamed over it, so that a reader finds the old content or the new one, never a half;
- a log of results grows by one line for each `append_line`. A kill can cut the last line short,
  and only the last: the reader drops such a tail and the next append removes it.
"""

import contextlib
import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from dp_clipping.files import flush_to_disk, replacing, write_atomically

__all__ = ["append_line", "read_lines", "replacing", "write_atomically"]


def say_unwritten(path: str | Path, error: OSError, consequence: str = "") -> None:
    """Prints on stderr, in one line, that a file could not be written, and what follows."""
    reason = error.strerror or str(error)
    rest = f"; {consequence}" if consequence else ""
    print(f"{path}: cannot be written ({reason}){rest}", file=sys.stderr, flush=True)


def append_line(path: str | Path, text: str) -> None:
    """Appends `text`, one JSON object or array without line breaks, as one durable line.

    Line and line break go out in a single `write` on a descriptor opened with `O_APPEND`, then to
    the disk with `fsync`. An advisory lock keeps two appending processes from repairing and
    writing at the same time. What an earlier kill cut short is removed first, so that the new
    line never sticks to it.
    """
    if "\n" in text or "\r" in text:
        raise ValueError(f"{path}: a line to append must not contain a line break")
    data = text.encode() + b"\n"
    with _locked(Path(path)) as descriptor:
        _repair_tail(descriptor)
        size = os.fstat(descriptor).st_size
        written = os.write(descriptor, data)
        if written != len(data):
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fit", str(path))
        os.fsync(descriptor)


def read_lines(path: str | Path) -> list:
    """Returns the parsed JSON lines of `path`, or an empty list if there is no such file.

    A last line without its line break that is no whole JSON value was cut short by a kill and is
    dropped. Anything else that cannot be parsed is a `ValueError` with file and line number.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    *lines, tail = content.split(b"\n")
    values = [_parse_line(path, number, line) for number, line in enumerate(lines, start=1)]
    if _is_whole(tail):
        values.append(json.loads(tail))
    return values


def _parse_line(path: Path, number: int, line: bytes):
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not a JSON line ({error})") from None


def _is_whole(tail: bytes) -> bool:
    """Returns whether a last line without line break is complete (written by an editor, say).

    Only objects and arrays can be told: a cut `123` would still parse as `12`.
    """
    try:
        return isinstance(json.loads(tail), dict | list)
    except ValueError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Opens `path` for reading and appending under an exclusive lock; yields the descriptor."""
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
    if created:
        flush_to_disk(path.parent)


def _repair_tail(descriptor: int) -> None:
    """Makes the open file end with a line break: cuts a broken tail off, terminates a whole one."""
    size = os.fstat(descriptor).st_size
    tail = _read_tail(descriptor, size)
    if not tail:
        return
    if _is_whole(tail):
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, size - len(tail))


def _read_tail(descriptor: int, size: int, block: int = 4096) -> bytes:
    """Reads the text after the last line break, backwards in blocks of `block` bytes."""
    tail = b""
    position = size
    while position > 0 and b"\n" not in tail:
        start = max(0, position - block)
        tail = os.pread(descriptor, position - start, start) + tail
        position = start
    return tail.rpartition(b"\n")[2]
