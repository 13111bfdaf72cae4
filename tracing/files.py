"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the body succeeds.

    The rename is atomic because both names are in one folder, so a reader sees the old file or
    the new one, never half of it. The temporary name keeps the suffix: writers that choose their
    format by it (matplotlib, torch.profiler) do the right thing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
