"""Writes files whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes `content` (text as UTF-8) to `path` so that it is there whole or not at all."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: str | Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yields an open file that takes the place of `path`, as `written_whole` does.

    `mode`, less the process's mask, holds from the moment the file exists.
    """
    with written_whole(path) as temporary:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w+b") as file:
            yield file


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yields a name to write to, and renames it to `path` if the `with` block raises no error.

    The temporary file lies in the same folder, because a rename is atomic only within one file
    system. `fsync` before the rename keeps a power cut from leaving an empty file under the final
    name; `fsync` of the folder makes the rename itself durable. A kill in between leaves a hidden
    `.NAME.RANDOM.tmp` behind and `path` untouched. An `OSError` names `path`, and not the temporary
    file.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        yield temporary
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        unnamed = isinstance(error, OSError) and error.errno is not None
        if unnamed and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Flushes a file, or the entries of a folder (a new name in it), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
