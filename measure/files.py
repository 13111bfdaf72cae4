"""Files that a killed process leaves whole: atomic replacement and durable JSON lines.

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
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` so that it is there whole or not at all."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: str | Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to fill that takes the place of `path` when the `with` block ends without an error.

    The temporary file lies in the same folder, because a rename is atomic only within one file
    system. `fsync` before the rename keeps a power cut from leaving an empty file under the final
    name; `fsync` of the folder makes the rename itself durable. A kill in between leaves a hidden
    `.NAME.RANDOM.tmp` behind and `path` untouched. `mode`, less the process's mask, holds from the
    moment the file exists. An `OSError` names `path`, not the temporary file, which nobody knows.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        unnamed = isinstance(error, OSError) and error.errno is not None
        if unnamed and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_folder(path.parent)


def say_unwritten(path: str | Path, error: OSError, consequence: str = "") -> None:
    """Print on stderr, in one line, that a file could not be written, and what follows."""
    reason = error.strerror or str(error)
    rest = f"; {consequence}" if consequence else ""
    print(f"{path}: cannot be written ({reason}){rest}", file=sys.stderr, flush=True)


def append_line(path: str | Path, text: str) -> None:
    """Append `text`, one JSON object or array without line breaks, as one durable line.

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
    """Return the parsed JSON lines of `path`, or an empty list if there is no such file.

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
    """Whether a last line without line break is complete (written by an editor, say).

    Only objects and arrays can be told: a cut `123` would still parse as `12`.
    """
    try:
        return isinstance(json.loads(tail), dict | list)
    except ValueError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open `path` for reading and appending under an exclusive lock; yield the descriptor."""
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
    if created:
        _sync_folder(path.parent)


def _repair_tail(descriptor: int) -> None:
    """Make the open file end with a line break: cut a broken tail off, terminate a whole one."""
    size = os.fstat(descriptor).st_size
    tail = _read_tail(descriptor, size)
    if not tail:
        return
    if _is_whole(tail):
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, size - len(tail))


def _read_tail(descriptor: int, size: int, block: int = 4096) -> bytes:
    """Read what follows the last line break, going backwards in blocks of `block` bytes."""
    tail = b""
    position = size
    while position > 0 and b"\n" not in tail:
        start = max(0, position - block)
        tail = os.pread(descriptor, position - start, start) + tail
        position = start
    return tail.rpartition(b"\n")[2]


def _sync_folder(folder: Path) -> None:
    """Flush a folder's own entries (a new name in it) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
