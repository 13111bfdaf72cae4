"""Checkpoints of sharded models: every rank writes its part, any number of ranks reads them.

`PATH` is a folder, `PATH.key` a file beside it, as secret as ever (see save_load.py).

    PATH/run.pt           what rank 0 writes: everything but the tensors of model and optimizer
    PATH/tensors-HEX/     those, in the format of torch.distributed.checkpoint, one file a rank

`run.pt` names the folder of its tensors and the SHA-256 of each file in it, and ends with its own
digest and HMAC (see file_format.py). Of the files a rank hashes those that it has written; at a
load the ranks share them out. A save is whole from one moment to the next:

    1  every rank writes its part into a new folder and hashes it
    2  the key file gets this run's key beside the ones it has
    3  run.pt takes the place of the old one
    4  keys and folders that no longer belong to it are removed

A load compares names, shapes and settings before it reads a tensor, reads into memory of its own
(for that long a rank holds its part of model and optimizer twice), and changes the run after all
ranks have all of it. Tensors are found by the parameter's name and lie wherever the ranks need
them: a checkpoint of four ranks loads on two, or in one process without any sharding.
"""

import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from dp_clipping.checkpoint.compatibility import check_fits
from dp_clipping.checkpoint.file_format import (
    OPTIMIZER,
    OWN,
    UNREADABLE,
    UNSEALED,
    check_contents,
    damaged,
    digest_of,
    key_path,
    read,
    write_sealed,
)
from dp_clipping.checkpoint.restore import Resume, Snapshot, agree, as_refusal, check_load, go_on
from dp_clipping.checkpoint.run import Run, agree_on_content, agree_on_success, random_states
from dp_clipping.checkpoint.tensors import (
    State,
    by_name,
    by_number,
    check_groups,
    check_part,
    room_for,
    take_tensors,
    with_tensors,
)  # fmt: skip
from dp_clipping.files import flush_to_disk
from dp_clipping.noise.keys import read_keys, write_keys

RUN_FILE = "run.pt"
TENSORS = "tensors"  # in the run's own entry: the name of their folder
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


# ---- saving --------------------------------------------------------------------------------------


def save(snapshot: Snapshot, extra: Mapping[str, Any]) -> None:
    """As `checkpoint.save`, between two steps; every rank writes.

    Raises:
        RuntimeError: if a rank could not write.
        ValueError: if a load without executing code could not read what is to be saved, or could
            not find the parts of a parameter again.
    """
    run, path = snapshot.run, snapshot.path
    random = random_states(run)
    name = _agreed_name(run)
    contents, tensors, problem = {}, {}, None
    try:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, and a sharded model needs a folder: rename one")
        contents = snapshot.contents(extra, random, lambda: by_name(run))
        contents[OWN][TENSORS] = name
        tensors = take_tensors(contents)
        for key, x in tensors.items():
            check_part(run, key, x)
        check_contents(contents, extra)
        (path / name).mkdir(parents=True, exist_ok=True)
    except Exception as error:
        problem = error
    agree(run, f"save {path}", problem)
    digests: dict[str, str] = {}
    try:
        _write_tensors(run, path / name, tensors)
        digests = _digests_of_own(run, path / name)
    except (Exception, dcp.CheckpointException) as error:
        problem = RuntimeError(f"{path} could not be written: {_reason(error)}")
        problem.__cause__ = error
    agree(run, f"write its part of {path}", problem)
    contents[OWN][FILES] = _of_all_ranks(run, digests)
    if run.group is None or dist.get_rank(run.group) == 0:
        try:
            _write_run(path, contents, run, snapshot.torch_kwargs)
        except Exception as error:
            problem = error
    agree_on_success(run, path, problem)
    if problem is not None:
        raise problem


def _agreed_name(run: Run) -> str:
    """Of a folder that is not there yet: rank 0's on every rank."""
    number = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device=run.device)
    if run.group is not None:
        dist.broadcast(number, group=run.group, group_src=0)
    return f"tensors-{bytes(number.tolist()).hex()}"


def _write_tensors(run: Run, folder: Path, tensors: dict[str, Tensor]) -> None:
    with _quiet():
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(folder),
            process_group=run.group,
            no_dist=run.group is None,
        )


def _digests_of_own(run: Run, folder: Path) -> dict[str, str]:
    """Of the files that this rank has written; torch names them by its number in the group."""
    rank = 0 if run.group is None else dist.get_rank(run.group)
    files = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        files.append(folder / DESCRIPTION)
    return {file.name: digest_of(file) for file in files}


def _of_all_ranks(run: Run, digests: dict[str, str]) -> dict[str, str]:
    if run.group is None:
        return digests
    of_ranks: list[dict[str, str]] = [{}] * dist.get_world_size(run.group)
    dist.all_gather_object(of_ranks, digests, group=run.group)
    return {name: digest for of_rank in of_ranks for name, digest in of_rank.items()}


def _write_run(path: Path, contents: State, run: Run, torch_kwargs: Mapping[str, Any]) -> None:
    beside = key_path(path)
    old = read_keys(beside)
    write_keys(beside, old if run.keys in old else [*old, run.keys])
    flush_to_disk(path / contents[OWN][TENSORS])  # torch syncs its files, not their names
    write_sealed(path / RUN_FILE, contents, run.keys, torch_kwargs)
    write_keys(beside, [run.keys])
    for other in path.iterdir():
        if FOLDER.fullmatch(other.name) and other.name != contents[OWN][TENSORS]:
            shutil.rmtree(other, ignore_errors=True)


# ---- loading -------------------------------------------------------------------------------------


def load(snapshot: Snapshot, new_keys: bool) -> State:
    """As `checkpoint.load`, of a folder that `save` has written, on any number of ranks."""
    run, path = snapshot.run, snapshot.path
    resume, tensors, problem = None, {}, None
    reader: SafeReader | None = None
    try:
        check_load(snapshot)
        saved = read(path / RUN_FILE, snapshot.torch_kwargs)
        _verify(run, path, saved)
        reader, known = _read_shapes(path, saved)
        keys, kept, notes = check_fits(snapshot, with_tensors(saved, known), new_keys)
        check_groups(run, saved, path)
        if not snapshot.with_optimizer:
            saved.pop(OPTIMIZER, None)
        tensors = room_for(run, saved, known)
        resume = Resume(saved, keys, kept, notes)
    except Exception as error:
        problem = as_refusal(path, error)
        if run.group is None:
            raise problem from problem.__cause__
    agree_on_content(run, path, resume and resume.digest(), problem)
    assert resume is not None
    assert reader is not None
    try:
        with _quiet():
            dcp.load(
                tensors,
                storage_reader=reader,
                process_group=run.group,
                no_dist=run.group is None,
            )
        resume.saved.update(with_tensors(resume.saved, tensors))
        if OPTIMIZER in resume.saved:
            resume.saved[OPTIMIZER] = by_number(run, resume.saved[OPTIMIZER])
    except (Exception, dcp.CheckpointException) as error:
        problem = damaged(path, f"its tensors cannot be read: {_reason(error)}")
        problem.__cause__ = error
    agree(run, f"load {path}", problem)
    return go_on(snapshot, resume)


def _verify(run: Run, path: Path, saved: State) -> None:
    """Raises ValueError if a file of this rank's share, or their description, was changed.

    A checkpoint of the version that saves no digest has none of them.
    """
    own = saved[OWN]
    if own["version"] == UNSEALED:
        return
    folder, files = _folder_of(path, saved), own.get(FILES)
    if not isinstance(files, dict) or DESCRIPTION not in files:
        raise damaged(path, "it does not name the files of its tensors")
    alone = run.group is None
    rank, ranks = (0, 1) if alone else (dist.get_rank(run.group), dist.get_world_size(run.group))
    for number, (name, digest) in enumerate(sorted(files.items())):
        file = folder / str(name)
        if not file.is_file():
            raise damaged(path, f"{folder.name}/{name} is missing")
        is_own = number % ranks == rank or name == DESCRIPTION  # every rank reads the description
        if is_own and digest_of(file) != digest:
            raise damaged(path, f"{folder.name}/{name} does not agree with its digest")


def _folder_of(path: Path, saved: State) -> Path:
    name = saved[OWN].get(TENSORS)
    if not (isinstance(name, str) and FOLDER.fullmatch(name)):
        raise damaged(path, "it does not name the folder of its tensors")
    return path / name


class SafeReader(dcp.FileSystemReader):
    """Reads the description of the tensors without executing what is in it.

    torch's own reader unpickles it; this one knows the few classes of which it consists, and
    whatever else is named there is refused.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("the description of the tensors is something else")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in SAFE
        if not known and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} is not in a checkpoint's description")
        return super().find_class(module, name)


def _read_shapes(path: Path, saved: State) -> tuple[SafeReader, dict[str, Tensor]]:
    """The reader, and shapes and dtypes of the tensors that it finds, as tensors without memory."""
    folder = _folder_of(path, saved)
    reader = SafeReader(folder)
    try:
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata
        files = {info.relative_path for info in metadata.storage_data.values()}
    except PermissionError:
        raise
    except (*UNREADABLE, AttributeError, TypeError) as error:
        raise damaged(path, f"{folder.name} is cut short") from error
    if not all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()):
        raise damaged(path, f"{folder.name} holds something else than tensors")
    if saved[OWN]["version"] != UNSEALED and not files <= saved[OWN][FILES].keys():
        raise damaged(path, f"{folder.name} has files without a digest")
    return reader, {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in entries.items()
    }


# ---- both ----------------------------------------------------------------------------------------


def _reason(error: BaseException) -> str:
    """On one line; torch's exception, which is no `Exception`, has those of all ranks."""
    if not isinstance(error, dcp.CheckpointException):
        return f"{error!r}"
    failures = {rank: failure[0] for rank, failure in error.failures.items()}
    return ", ".join(f"{failure!r} on rank {rank}" for rank, failure in sorted(failures.items()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a process alone is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
