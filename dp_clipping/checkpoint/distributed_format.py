"""Checkpoints of sharded models: every rank writes its part; any number of ranks reads them.

`PATH` is a folder. `PATH.key` beside it is a file, and as secret as for one process (save_load.py).

    PATH/run.pt           what rank 0 writes: everything but the tensors of model and optimizer
    PATH/tensors-HEX/     those, in the format of torch.distributed.checkpoint, one file per rank

`run.pt` names the folder of its tensors and the SHA-256 of each file in it, and ends with its own
digest and HMAC (see file_format.py). Of the files a rank hashes those that it has written; at a
load the ranks share them out. A save replaces the old checkpoint at one moment:

    1  every rank writes its part into a new folder and hashes it
    2  the key file gets this run's key beside the ones it has
    3  run.pt takes the place of the old one
    4  keys and folders that no longer belong to it are removed

A load compares names, shapes and settings before it reads a tensor, reads into memory of its own
(for that long a rank holds its part of model and optimizer twice), and changes the run after all
ranks have all of it. Tensors are found by the parameter's name and lie wherever the ranks need
them: a checkpoint of four ranks loads on two, or in one process without any sharding.

torch's converters between a folder and a file (`torch.distributed.checkpoint.format_utils`) are no
substitute: both unpickle with `weights_only=False`, which executes code, and neither has digests.
"""

import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dp_clipping.checkpoint.file_format import DETAILS, damaged, digest_of, write
from dp_clipping.checkpoint.run import PrivateRun, Snapshot
from dp_clipping.files import flush_to_disk
from dp_clipping.noise.keys import from_rank_0

RUN_FILE = "run.pt"
TENSORS = "tensors"  # in the details: the name of their folder
FILES = "files"  # there too: name of each file in it -> SHA-256
DESCRIPTION = ".metadata"
FOLDER = re.compile(r"tensors-[0-9a-f]{16}")
SAFE = {
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
}  # fmt: skip


def new_name(run: PrivateRun) -> str:
    """Returns the name of a folder for tensors that is not there yet: rank 0's on every rank."""
    return f"tensors-{from_rank_0(secrets.token_bytes(8), run.group, run.device).hex()}"


def write_part(run: PrivateRun, folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Writes this rank's part of the tensors; every rank calls it.

    Returns:
        The digests of the files that this rank has written, by name.

    Raises:
        RuntimeError: if a rank could not write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet():
            dcp.save(
                tensors,
                storage_writer=dcp.FileSystemWriter(folder),
                process_group=run.group,
                no_dist=run.group is None,
            )
        files = sorted(folder.glob(f"__{run.rank}_*"))  # torch names them by the rank in the group
        if run.rank == 0:
            files.append(folder / DESCRIPTION)
        return {file.name: digest_of(file) for file in files}
    except (Exception, dcp.CheckpointException) as error:
        message = f"{folder.parent} could not be written: {_reason(error)}"
        raise RuntimeError(message) from error


def write_run(snapshot: Snapshot, contents: dict[str, Any]) -> None:
    """Writes `run.pt` and the key file, then removes tensors that no longer belong to it."""
    run, path = snapshot.run, snapshot.path
    flush_to_disk(path / contents[DETAILS][TENSORS])  # torch syncs its files, not their names
    write(path / RUN_FILE, contents, run.keys, snapshot.torch_kwargs, snapshot.key_file)
    for other in path.iterdir():
        if FOLDER.fullmatch(other.name) and other.name != contents[DETAILS][TENSORS]:
            shutil.rmtree(other, ignore_errors=True)


def verify(run: PrivateRun, path: Path, saved: dict[str, Any]) -> None:
    """Raises ValueError if a file of this rank's share, or their description, was changed."""
    folder = path / saved[DETAILS][TENSORS]
    for number, (name, digest) in enumerate(sorted(saved[DETAILS][FILES].items())):
        file = folder / name
        if not file.is_file():
            raise damaged(path, f"{folder.name}/{name} is missing")
        is_shared = name == DESCRIPTION  # every rank reads it
        if (is_shared or number % run.world_size == run.rank) and digest_of(file) != digest:
            raise damaged(path, f"{folder.name}/{name} does not agree with its digest")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ValueError in place of whatever error there is inside."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        raise damaged(path, f"its tensors cannot be read: {_reason(error)}") from error


def read_tensors(run: PrivateRun, reader: "SafeReader", room: dict[str, Tensor]) -> None:
    """Reads into `room` this rank's part of each tensor in it; every rank calls it."""
    with _quiet():
        dcp.load(room, storage_reader=reader, process_group=run.group, no_dist=run.group is None)


class SafeReader(dcp.FileSystemReader):
    """Reads the description of the tensors without executing what is in it.

    torch's own reader unpickles it; this one knows the few classes of which it consists, and
    whatever else is named there is refused.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / DESCRIPTION, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("the description of the tensors is something else")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # Python 3.13 calls it so
            module = "pathlib"
        known = (module, name) in SAFE
        if not known and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} is not in a checkpoint's description")
        return super().find_class(module, name)


def read_shapes(path: Path, saved: dict[str, Any]) -> tuple[SafeReader, dict[str, Tensor]]:
    """Returns a reader, and the tensors that it finds as tensors without memory, by name."""
    reader = SafeReader(path / saved[DETAILS][TENSORS])
    with reading(path):
        metadata = reader.read_metadata()
        files = {info.relative_path for info in metadata.storage_data.values()}
        if not files <= saved[DETAILS][FILES].keys():
            raise ValueError("some files have no digest")
        return reader, {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in metadata.state_dict_metadata.items()
        }


def _reason(error: BaseException) -> str:
    """Returns a reason on one line; torch's exception, no `Exception`, has those of all ranks."""
    if not isinstance(error, dcp.CheckpointException):
        return f"{error!r}"
    failures = {rank: failure[0] for rank, failure in error.failures.items()}
    return ", ".join(f"{failure!r} on rank {rank}" for rank, failure in sorted(failures.items()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses torch's warning that torch.distributed is disabled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
