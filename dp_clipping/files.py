"""Files that are written whole or not at all."""

import contextlib
import os
import secrets
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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries (a new name in it) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
