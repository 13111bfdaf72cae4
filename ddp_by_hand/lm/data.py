"""Text and synthetic tokens, and the batches of them, sharded by rank.

A batch is a pure function of (seed, step, rank): a resume has nothing to restore, and W ranks of B
sequences read exactly what one process with W · B sequences reads. Each rank draws the starts of
all sequences of the global batch, which is cheap, and reads only its own.
"""

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BYTE_VALUES = 256
STDLIB_BYTES = 8_000_000
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens from which sequences are drawn; `source` names them as the user did.

    `tokens` is uint8 [N], the bytes of the text, or None for random tokens below `vocab_size`.
    """

    source: str
    vocab_size: int
    tokens: np.ndarray | None

    def draw(
        self, generator: np.random.Generator, total: int, rows: slice, length: int
    ) -> np.ndarray:
        """Returns the given rows of `total` sequences of `length` tokens: int64 [rows, length].

        Sequences start anywhere, uniformly, and may overlap. What is drawn from the generator does
        not depend on `rows`.
        """
        if self.tokens is None:
            return generator.integers(self.vocab_size, size=(total, length))[rows]
        starts = generator.integers(len(self.tokens) - length + 1, size=total)[rows]
        return self.tokens[starts[:, None] + np.arange(length)].astype(np.int64)


def open_data(source: str, vocab_size: int) -> Corpus:
    """Returns the corpus that `--data` names.

    | source | tokens |
    | --- | --- |
    | `stdlib` | bytes of the running Python's own library sources, sorted by path, up to 8 MB |
    | `synthetic` | seeded random tokens below `vocab_size` |
    | a path | bytes of that file, or of every text file below that folder, sorted by path |

    Text is held in memory. Below a folder, what cannot be read and binary files (those with a NUL
    byte) are skipped. Raises ValueError, on one line, where no text is left or `vocab_size` cannot
    hold a byte.
    """
    if source == "synthetic":
        if vocab_size < 1:
            raise ValueError(f"--vocab-size is {vocab_size}: give 1 or more")
        return Corpus(source, vocab_size, None)
    if vocab_size < BYTE_VALUES:
        raise ValueError(
            f"--vocab-size is {vocab_size}, and --data {source!r} is text read as bytes: "
            "bytes need --vocab-size 256 or more"
        )
    text = _read_stdlib() if source == "stdlib" else _read_path(source)
    return Corpus(source, vocab_size, np.frombuffer(text, dtype=np.uint8))


class Batches:
    """The batches of one rank: `batches(step)` gives (inputs, targets).

    Both are int64 CPU tensors [batch_size, context_length]; targets are inputs shifted by one.
    Rank r has rows r·B to (r+1)·B of the step's global batch of world_size·B sequences. Raises
    ValueError for sizes below 1, a rank outside the world, a negative seed or step, and a text
    shorter than one sequence.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        batch_size: int,
        context_length: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        sizes = {
            "batch_size": batch_size,
            "context_length": context_length,
            "world_size": world_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}: give 1 or more")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: give 0 to {world_size - 1}, below world_size")
        if seed < 0:
            raise ValueError(f"seed is {seed}: give 0 or more")
        _require_one_sequence(corpus, context_length + 1)
        self.corpus = corpus
        self.seed = seed
        self.sequence_length = context_length + 1
        self.global_batch_size = world_size * batch_size
        self.rows = slice(rank * batch_size, (rank + 1) * batch_size)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        if step < 0:
            raise ValueError(f"step is {step}: steps are counted from 0, give 0 or more")
        sequences = self.corpus.draw(
            _generator(self.seed, step), self.global_batch_size, self.rows, self.sequence_length
        )
        tokens = torch.from_numpy(sequences)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _generator(seed: int, step: int) -> np.random.Generator:
    """Returns a random generator for each (seed, step).

    The step is a spawn key and not a second seed word: numpy joins such words end to end, so that
    [2**32, 0] and [0, 1] would be one stream.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(step,)))


def _require_one_sequence(corpus: Corpus, length: int) -> None:
    if corpus.tokens is not None and len(corpus.tokens) < length:
        raise ValueError(
            f"--data {corpus.source!r} holds {len(corpus.tokens)} bytes, and one sequence needs "
            f"--context-length + 1 = {length}: give more text or a shorter context"
        )


def _read_stdlib() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = (path for path in _files_below(root, skipped=NOT_STDLIB) if path.suffix == ".py")
    text = _join_texts(sources, limit=STDLIB_BYTES)
    if not text:
        raise ValueError(
            f"--data 'stdlib' found no Python sources in {str(root)!r}: give --data a text file, "
            "a folder of text or synthetic"
        )
    return text


def _read_path(source: str) -> bytes:
    path = os.path.expanduser(source)  # a str: Path("") would be the current folder
    if not os.path.exists(path):
        raise ValueError(
            f"--data {source!r} does not exist: give a text file, a folder of text, stdlib or "
            "synthetic"
        )
    if os.path.isfile(path):
        return _read_file(Path(path), source)
    if not os.path.isdir(path):
        raise ValueError(
            f"--data {source!r} is neither a regular file nor a folder: give one of the two"
        )
    text = _join_texts(_files_below(Path(path)))
    if not text:
        raise ValueError(
            f"--data {source!r} is a folder without readable text: give one that holds text files"
        )
    return text


def _read_file(path: Path, source: str) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"--data {source!r} cannot be read ({error.strerror}): give a readable text file"
        ) from error
    if not text:
        raise ValueError(f"--data {source!r} is empty: give a file that holds text")
    if b"\0" in text:
        raise ValueError(f"--data {source!r} is binary (it has NUL bytes): give a text file")
    return text


def _files_below(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Returns the regular files below root by path; folders named in `skipped` are not entered."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        found += [Path(folder, name) for name in names]
    return (path for path in sorted(found) if os.path.isfile(path))


def _join_texts(paths: Iterable[Path], limit: int | None = None) -> bytes:
    """Joins the files, cut at `limit` bytes; unreadable and binary ones are left out."""
    text = bytearray()
    for path in paths:
        if limit is not None and len(text) >= limit:
            break
        try:
            part = path.read_bytes()
        except OSError:
            continue
        if b"\0" not in part:
            text += part
    return bytes(text[:limit])
