"""Checkpoints of sharded models: every rank writes its part, any number of ranks reads them.

`PATH` is a folder, `PATH.key` a file beside it, as secret as ever (see checkpoint.py).

    PATH/run.pt           what rank 0 writes: everything but the tensors of model and optimizer
    PATH/tensors-HEX/     those, in the format of torch.distributed.checkpoint, one file a rank

`run.pt` names the folder of its tensors, so that a save is whole from one moment to the next:

    1  every rank writes its part into a new folder
    2  the key file gets this run's key beside the ones it has
    3  run.pt takes the place of the old one
    4  keys and folders that no longer belong to it are removed

A load compares names, shapes and settings before it reads a tensor, reads into memory of its own
(for that long a rank holds its part of model and optimizer twice), and changes the run after all
ranks have all of it. Tensors are found by the parameter's name and lie wherever the ranks need
them: a checkpoint of four ranks loads on two, or in one process without any sharding.
"""

import os
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

from dp_clipping.checkpoint_file import OPTIMIZER, OWN, UNREADABLE, check_contents, key_path, read
from dp_clipping.checkpoint_tensors import (
    State,
    by_name,
    by_number,
    check_groups,
    check_part,
    room_for,
    take_tensors,
    with_tensors,
)  # fmt: skip
from dp_clipping.fits import check_fits
from dp_clipping.keys import read_keys, write_keys
from dp_clipping.resume import Resume, Snapshot, check_load, go_on
from dp_clipping.run import Run, agree_on_content, agree_on_success, random_states
from measure.files import replacing

RUN_FILE = "run.pt"
TENSORS = "tensors"  # in the run's own entry: the name of their folder
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
    _agree(run, f"save {path}", problem)
    try:
        _write_tensors(run, path / name, tensors)
    except (Exception, dcp.CheckpointException) as error:
        problem = RuntimeError(f"{path} could not be written: {_reason(error)}")
        problem.__cause__ = error
    _agree(run, f"write its part of {path}", problem)
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


def _write_run(path: Path, contents: State, run: Run, torch_kwargs: Mapping[str, Any]) -> None:
    beside = key_path(path)
    old = read_keys(beside)
    write_keys(beside, old if run.keys in old else [*old, run.keys])
    _sync_folder(path / contents[OWN][TENSORS])
    with replacing(path / RUN_FILE) as file:
        torch.save(contents, file, **torch_kwargs)
    write_keys(beside, [run.keys])
    for other in path.iterdir():
        if FOLDER.fullmatch(other.name) and other.name != contents[OWN][TENSORS]:
            shutil.rmtree(other, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """torch syncs the files; their names are to be on the disk before run.pt names the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- loading -------------------------------------------------------------------------------------


def load(snapshot: Snapshot, new_keys: bool) -> State:
    """As `checkpoint.load`, of a folder that `save` has written, on any number of ranks."""
    run, path = snapshot.run, snapshot.path
    resume, tensors, problem = None, {}, None
    reader: SafeReader | None = None
    try:
        check_load(snapshot)
        saved = read(path / RUN_FILE, snapshot.torch_kwargs)
        reader, known = _read_shapes(path, saved)
        keys, kept, notes = check_fits(snapshot, with_tensors(saved, known), new_keys)
        check_groups(run, saved, path)
        if not snapshot.with_optimizer:
            saved.pop(OPTIMIZER, None)
        tensors = room_for(run, saved, known)
        resume = Resume(saved, keys, kept, notes)
    except Exception as error:
        if run.group is None:
            raise
        problem = error
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
    except (Exception, dcp.CheckpointException) as error:
        problem = ValueError(
            f"{path} is not a whole checkpoint: its tensors cannot be read: {_reason(error)}"
        )
        problem.__cause__ = error
    _agree(run, f"load {path}", problem)
    resume.saved.update(with_tensors(resume.saved, tensors))
    if OPTIMIZER in resume.saved:
        resume.saved[OPTIMIZER] = by_number(run, resume.saved[OPTIMIZER])
    return go_on(snapshot, resume)


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
    name = saved[OWN].get(TENSORS)
    if not (isinstance(name, str) and FOLDER.fullmatch(name)):
        raise ValueError(f"{path} does not name the folder of its tensors: it was changed")
    reader = SafeReader(path / name)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except PermissionError:
        raise
    except (*UNREADABLE, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {name} is cut short") from error
    if not all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()):
        raise ValueError(f"{path} holds something else than tensors in {name}: it was changed")
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


def _agree(run: Run, what: str, problem: BaseException | None) -> None:
    """All ranks go on, or all raise: their own problem, or the number of a rank that has one."""
    if run.group is None:
        if problem is not None:
            raise problem
        return
    mine = torch.tensor([problem is None], dtype=torch.uint8, device=run.device)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(run.group))]
    dist.all_gather(of_ranks, mine, group=run.group)
    if problem is not None:
        raise problem
    failed = [rank for rank, success in enumerate(of_ranks) if not success.item()]
    if failed:
        raise RuntimeError(f"rank {failed[0]} could not {what}: its own error says why")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a process alone is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
