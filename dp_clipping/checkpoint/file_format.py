"""The file of a checkpoint: written whole, read without executing code, verified before it is read.

After the bytes of `torch.save` comes a line with the SHA-256 of all bytes before it, and an HMAC of
that digest under a key derived from the run's. The digest finds damage: a flipped bit, a
file that was cut short, a file that was saved again by `torch.save`. The HMAC also finds an edit
by someone who computed the digest again but lacks the key file. `torch.load` and programs
that read zip files ignore the line.

The digest is computed while the file is written, and by one pass over the file before it is loaded,
in pieces of `PIECE` bytes.
"""

import hashlib
import hmac
import os
import pickle
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dp_clipping.files import replacing
from dp_clipping.kinds import shown
from dp_clipping.noise.keys import Keys, read_keys, write_keys
from dp_clipping.torch_compat import tree_map_only

VERSION = 2
PIECE = 1 << 20  # bytes that are read and hashed at a time
DIGEST = "digest"  # in the details of a checkpoint that was read: that of all its content
SEAL_LINE = re.compile(rb"\ndp_clipping sha256 ([0-9a-f]{64}) hmac ([0-9a-f]{64})\n")
SEAL_BYTES = len("\ndp_clipping sha256  hmac \n") + 2 * 64
DETAILS = "dp_clipping"  # the entry that Opacus does not have
MODULE, OPTIMIZER = "module_state_dict", "optimizer_state_dict"
ACCOUNTANT = "privacy_accountant_state_dict"
ALWAYS = (MODULE, ACCOUNTANT)
SCHEDULERS = ("noise_scheduler_state_dict", "grad_clip_scheduler_state_dict")
RESERVED = {DETAILS, *ALWAYS, *SCHEDULERS, OPTIMIZER}


def key_path(path: Path) -> Path:
    return path.with_name(path.name + ".key")


def key_file(path: str | os.PathLike, given: str | os.PathLike | None = None) -> Path:
    """Returns the file of a checkpoint's key: the one that is given, or `path` + ".key".

    Raises:
        ValueError: it is the checkpoint itself.
    """
    if given is None:
        return key_path(Path(path))
    if Path(given).absolute() == Path(path).absolute():
        raise ValueError(
            f"key_path is {given}, the checkpoint itself: give another file, or leave key_path out"
        )
    return Path(given)


def check_places(path: Path, of_keys: Path, is_folder: bool = False) -> None:
    """Raises an error where a checkpoint, or its key file, cannot be written; writes nothing.

    Args:
        is_folder: the checkpoint is a folder, which is made with the folders that it is in.

    Raises:
        ValueError: a file is a folder, or the key file is there and is none.
        FileNotFoundError: the folder of a file is not there, and is not made.
    """
    made = [*map(Path.absolute, (path, *path.parents))] if is_folder else []
    for file in [of_keys] if is_folder else [path, of_keys]:
        if file.is_dir():
            within = file / ("run.pt.key" if file is of_keys else "run.pt")
            raise ValueError(f"{file} is a folder: give the name of a file, as {within}")
        if not file.parent.is_dir() and file.parent.absolute() not in made:
            raise FileNotFoundError(
                f"there is no folder {file.parent}: make it first, as "
                f"os.makedirs({str(file.parent)!r})"
            )
    read_keys(of_keys)


def write(
    path: Path, contents: dict, keys: Keys, torch_kwargs: Mapping[str, Any], of_keys: Path
) -> None:
    """Writes a checkpoint and its key, to the file `of_keys`."""
    old = read_keys(of_keys)
    write_keys(of_keys, old if keys in old else [*old, keys])
    write_sealed(path, contents, keys, torch_kwargs)
    write_keys(of_keys, [keys])


def write_sealed(path: Path, contents: dict, keys: Keys, torch_kwargs: Mapping[str, Any]) -> None:
    """Writes `contents` and the line with their digest, whole or not at all."""
    with replacing(path) as file:
        hashed = _Hashing(file)
        try:
            torch.save(contents, hashed, **torch_kwargs)
        except RuntimeError as error:
            interrupt = error.__context__  # PyTorch then fails to close what it was writing
            if isinstance(interrupt, KeyboardInterrupt):
                raise interrupt from None
            raise
        digest = hashed.digest.hexdigest()
        file.write(f"\ndp_clipping sha256 {digest} hmac {keys.mac(digest)}\n".encode())


class _Hashing:
    """A file for `torch.save` to write to, which hashes what is written."""

    def __init__(self, file: BinaryIO):
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def digest_of(path: Path, size: int | None = None) -> str:
    """Returns the SHA-256 of a file, or of its first `size` bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size if size is None else size
        while piece := file.read(min(PIECE, left)):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} is not a whole checkpoint: {what}; nothing was loaded: restore it from a copy, or "
        "load another checkpoint"
    )


def read(path: Path, torch_kwargs: Mapping[str, Any], of_keys: Path) -> dict[str, Any]:
    """Returns the entries of a checkpoint, after its digest and, with its key, its HMAC agree.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no whole checkpoint of this version, or was changed after saving.
    """
    if torch_kwargs.get("weights_only") is False:
        raise ValueError("weights_only=False would execute code from the checkpoint: drop it")
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    digest, mac = _read_seal(path)
    saved = torch.load(path, **{"map_location": "cpu", **torch_kwargs, "weights_only": True})
    details = saved[DETAILS]
    if details["version"] != VERSION:
        raise ValueError(
            f"{path} has version {shown(details['version'])}, this program reads {VERSION}"
        )
    counted = sum(steps for *_, steps in saved[ACCOUNTANT]["history"])
    if counted < details["steps"]:
        what = f"its account has {counted} steps, and the run has taken {details['steps']}"
        raise damaged(path, what)
    try:
        keys = read_keys(of_keys)
    except ValueError:
        keys = []  # an error only where the key is needed
    for key in keys:
        is_own = key.fingerprint == details["key_fingerprint"]
        if is_own and not hmac.compare_digest(key.mac(digest), mac):
            raise damaged(path, f"it was changed after saving, by somebody without {of_keys}")
    details[DIGEST] = digest
    return saved


def _read_seal(path: Path) -> tuple[str, str]:
    """Returns digest and HMAC at the end of the file.

    Raises ValueError if there are none, or the digest is not that of the content.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - SEAL_BYTES
        file.seek(max(size, 0))
        match = SEAL_LINE.fullmatch(file.read())
    if match is None:
        raise damaged(
            path,
            "it has no digest, so it was cut short, changed after saving, or written by another "
            "program than save_checkpoint",
        )
    digest, mac = (found.decode() for found in match.groups())
    if digest_of(path, size) != digest:
        raise damaged(path, "its content does not agree with its digest")
    return digest, mac


def check_contents(
    contents: dict[str, Any], extra: Mapping[str, Any], torch_kwargs: Mapping[str, Any]
) -> None:
    """Raises ValueError for entries that a load would refuse; skips tensors, so it is cheap."""
    clash = sorted(set(extra) & RESERVED)
    if clash:
        raise ValueError(f"checkpoint_dict has {', '.join(clash)}, which are written here: rename")
    _check_entry([1], torch_kwargs, (
        f"with torch_save_kwargs={dict(torch_kwargs)} torch.save makes no file that load_checkpoint"
        " could read: leave them out"
    ))  # fmt: skip
    for name, entry in contents.items():
        _check_entry(entry, {}, (
            f"{name} holds something that cannot be loaded without executing code: give "
            "tensors, numbers, strings, None, and lists, tuples or dicts of them"
        ))  # fmt: skip


def _check_entry(entry: Any, torch_kwargs: Mapping[str, Any], refusal: str) -> None:
    """Raises ValueError with this message unless the entry can be written and read again."""
    buffer = BytesIO()
    try:
        torch.save(
            tree_map_only(Tensor, lambda _: torch.empty(0, device="cpu"), entry),
            buffer,
            **torch_kwargs,
        )
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(refusal) from error


def plain(value: Any) -> Any:
    """Converts numbers and containers to Python's own: loading numpy's would execute code."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value)
    return value.item() if hasattr(value, "item") and not isinstance(value, Tensor) else value


def given_schedulers(noise_scheduler: Any, grad_clip_scheduler: Any) -> dict[str, Any]:
    """Returns entry in the checkpoint -> scheduler, of those that are there."""
    both = zip(SCHEDULERS, (noise_scheduler, grad_clip_scheduler), strict=True)
    return {entry: scheduler for entry, scheduler in both if scheduler is not None}


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Returns the state without the functions of Lambda schedulers, which a load keeps."""
    return {k: plain(v) for k, v in scheduler.state_dict().items() if not callable(v)}
