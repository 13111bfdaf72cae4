"""Data sets from files that a machine has: nothing is downloaded.

| name | files, in the folder or in one of the data set's name below it |
| --- | --- |
| `fashion-mnist`, `mnist` | `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, ..; or `.gz` |
| `cifar10` | `data_batch_1` to `5` and `test_batch`, Python's or with `.bin` |
| `digits` | `digits.csv.gz`, or that of an installed scikit-learn |
"""

import gzip
import pickle
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

UNPACKED = "usr/share/datasets"  # where Debian's packages have data
FOLDER = Path("data")


class Images(NamedTuple):
    """Images uint8 [N, C, side, side] and labels int64 [N], to train on and to test."""

    train: Tensor
    labels: Tensor
    test: Tensor
    answers: Tensor


def open_images(name: str, folder: Path) -> Images:
    """Returns a data set of images by its name.

    Raises:
        FileNotFoundError: its files are not there; says where they were looked for.
        ValueError: a file is not of the format.
    """
    return _IMAGES[name](name, folder)


def _found(name: str, folder: Path, *files: str) -> Path:
    """Returns the first of these files that is there."""
    folders = [folder, folder / name, folder / UNPACKED / name, Path("/") / UNPACKED / name]
    for place in folders:
        for file in files:
            if (place / file).is_file():
                return place / file
    cure = "call make records-data, or give" if name == "fashion-mnist" else "give"
    raise FileNotFoundError(
        f"{name}: no {files[0]} in {', '.join(map(str, folders))}: {cure} --data FOLDER"
    )


def _idx_images(name: str, folder: Path) -> Images:
    parts = []
    for split in ("train", "t10k"):
        for what in ("images-idx3", "labels-idx1"):
            file = f"{split}-{what}-ubyte"
            parts.append(read_idx(_found(name, folder, file, f"{file}.gz")))
    train, labels, test, answers = parts
    return Images(train[:, None], labels.long(), test[:, None], answers.long())


def read_idx(path: Path) -> Tensor:
    """Returns the bytes of an idx file: uint8 of the shape that its header says.

    Raises ValueError for another type of entries, or another number of them.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: no idx file of bytes: give one that begins with 00 00 08")
    begin = 4 + 4 * data[3]
    shape = struct.unpack(f">{data[3]}I", data[4:begin]) if len(data) >= begin else (-1,)
    if len(data) - begin != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path}: {len(data)} bytes, and its header says {shape}: copy it again")
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=begin).reshape(shape).copy())


def _cifar10(name: str, folder: Path) -> Images:
    names = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]
    places = ("", "cifar-10-batches-py/", "cifar-10-batches-bin/")
    parts = []
    for file in names:
        path = _found(name, folder, *(p + file + end for p in places for end in ("", ".bin")))
        parts.append(read_cifar_binary(path) if path.suffix else read_cifar_pickle(path))
    images, labels = zip(*parts, strict=True)
    return Images(torch.cat(images[:-1]), torch.cat(labels[:-1]), images[-1], labels[-1])


def read_cifar_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Returns images uint8 [N, 3, 32, 32] and labels [N] of a file of rows of 3073 bytes."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if len(data) % 3073 or not len(data):
        raise ValueError(f"{path}: {len(data)} bytes are not rows of 3073: copy it again")
    rows = torch.from_numpy(data.reshape(-1, 3073).copy())
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def read_cifar_pickle(path: Path) -> tuple[Tensor, Tensor]:
    """Returns images uint8 [N, 3, 32, 32] and labels [N]; only arrays are unpickled.

    Raises ValueError for a pickle that would call anything else, or without `data` and `labels`.
    """
    with path.open("rb") as file:
        try:
            found = _ArraysOnly(file, encoding="bytes").load()
            data, labels = found[b"data"], found[b"labels"]
        except (pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
            raise ValueError(f"{path}: no batch of CIFAR-10 ({error}): copy it again") from error
    return torch.from_numpy(data.copy()).reshape(-1, 3, 32, 32), torch.tensor(labels)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles containers, numbers, strings and NumPy arrays: what it calls can do no harm."""

    def find_class(self, module: str, name: str) -> Any:
        called = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if called == "numpy.core.multiarray._reconstruct":
            return np._core.multiarray._reconstruct
        known = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype, "_codecs.encode": _encode}
        if called not in known:
            raise pickle.UnpicklingError(f"it would call {called}, which arrays do not need")
        return known[called]


def _encode(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


def _digits(name: str, folder: Path) -> Images:
    """Reads scikit-learn's digits: 64 pixels from 0 to 16 and a label a line; the last are a test.

    The split is at four fifths, as in scikit-learn's examples the order is that of the file.
    """
    learn = find_spec("sklearn")
    inside = Path(learn.origin).parent / "datasets/data/digits.csv.gz" if learn else None
    path = inside if inside is not None else _found(name, folder, "digits.csv.gz")
    rows = np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2)
    if rows.shape[1] != 65:
        raise ValueError(f"{path}: {rows.shape[1]} numbers a line, not 65: copy it again")
    images = torch.from_numpy(rows[:, :64] * 255 // 16).to(torch.uint8).reshape(-1, 1, 8, 8)
    labels, split = torch.from_numpy(rows[:, 64].copy()), len(rows) * 4 // 5
    return Images(images[:split], labels[:split], images[split:], labels[split:])


_IMAGES: dict[str, Callable[[str, Path], Images]] = {
    "fashion-mnist": _idx_images, "mnist": _idx_images, "cifar10": _cifar10, "digits": _digits,
}  # fmt: skip
