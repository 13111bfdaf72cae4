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
import math
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dp_clipping.checkpoint.random_states import is_random_state
from dp_clipping.files import replacing
from dp_clipping.kinds import shown
from dp_clipping.noise.keys import Keys, read_keys, write_keys
from dp_clipping.torch_compat import tree_map_only

VERSION = 2
UNSEALED = 1  # the version that has no digest
PIECE = 1 << 20  # bytes that are read and hashed at a time
SEAL = "seal"  # in the details of a checkpoint that was read: its digest and HMAC
SEAL_LINE = re.compile(rb"\ndp_clipping sha256 ([0-9a-f]{64}) hmac ([0-9a-f]{64})\n")
SEAL_BYTES = len("\ndp_clipping sha256  hmac \n") + 2 * 64
DETAILS = "dp_clipping"  # the entry that Opacus does not have
DETAIL_ENTRIES = (
    "run", "key_fingerprint", "steps", "sampler", "start", "noise_multiplier", "max_grad_norm",
    "random",
)  # fmt: skip
MODULE, OPTIMIZER = "module_state_dict", "optimizer_state_dict"
ACCOUNTANT = "privacy_accountant_state_dict"
ALWAYS = (MODULE, ACCOUNTANT)
SCHEDULERS = ("noise_scheduler_state_dict", "grad_clip_scheduler_state_dict")
RESERVED = {DETAILS, *ALWAYS, *SCHEDULERS, OPTIMIZER}
UNREADABLE = (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError)


def key_path(path: Path) -> Path:
    return path.with_name(path.name + ".key")


def key_file(path: str | os.PathLike, given: str | os.PathLike | None = None) -> Path:
    """Returns the file of a checkpoint's key: the one that is given, or `path` + ".key"."""
    return key_path(Path(path)) if given is None else Path(given)


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


def _read_seal(path: Path) -> tuple[str, str] | None:
    """Returns digest and HMAC at the end of the file, the digest verified; None without them.

    Raises ValueError if the digest is not that of the content.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - SEAL_BYTES
        file.seek(max(size, 0))
        match = SEAL_LINE.fullmatch(file.read())
    if match is None:
        return None
    digest, mac = (found.decode() for found in match.groups())
    if digest_of(path, size) != digest:
        raise damaged(path, "its content does not agree with its digest")
    return digest, mac


def check_mac(path: Path, details: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError if the key of the checkpoint is at hand and did not seal this content.

    Args:
        details: those of the checkpoint that `read` has returned.
        file: the key file.
    """
    if SEAL not in details:
        return
    try:
        keys = read_keys(file)
    except ValueError:
        return  # an error only where the key is needed
    digest, mac = details[SEAL]
    for key in keys:
        if key.fingerprint == details["key_fingerprint"] and not hmac.compare_digest(
            key.mac(digest), mac
        ):
            raise damaged(path, f"it was changed after saving, by somebody without {file}")


def read(path: Path, torch_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if torch_kwargs.get("weights_only") is False:
        raise ValueError("weights_only=False would execute code from the checkpoint: drop it")
    options = {"map_location": "cpu", **torch_kwargs, "weights_only": True}
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    seal = _read_seal(path)
    try:
        saved = torch.load(path, **options)
    except PermissionError:
        raise
    except UNREADABLE as error:
        raise damaged(path, "it is cut short, or another kind of file") from error
    details = saved.get(DETAILS) if isinstance(saved, dict) else None
    if not isinstance(details, dict):
        raise ValueError(f"{path} was not written by dp_clipping's save_checkpoint")
    version = details.get("version")
    if type(version) is not int or version not in (VERSION, UNSEALED):
        raise ValueError(f"{path} has version {shown(version)}, this program reads {VERSION}")
    if version == VERSION and seal is None:
        raise damaged(path, "it has no digest, so it was cut short, or changed after saving")
    missing = ({*ALWAYS} - {*saved}) | ({*DETAIL_ENTRIES} - {*details})
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it was changed after saving")
    check_structure(path, saved)
    details.pop(SEAL, None)
    if seal is not None:
        details[SEAL] = seal
    else:
        warnings.warn(
            f"{path} was written by a version that saves no digest: whether it was damaged or "
            "changed cannot be seen; save it again with save_checkpoint",
            stacklevel=2,
        )
    return saved


def check_structure(path: Path, saved: Mapping[str, Any]) -> None:
    """Raises ValueError if an entry has not the form that a save writes; ignores tensors."""
    details, account = saved[DETAILS], saved[ACCOUNTANT]
    limits = details["max_grad_norm"]
    random = details["random"]
    state = saved.get(OPTIMIZER, {"state": {}, "param_groups": []})
    for name, right in (
        (MODULE, _has_names(saved[MODULE])),
        (ACCOUNTANT, _has_names(account) and isinstance(account.get("mechanism"), str)
         and _is_history(account.get("history"))),
        (OPTIMIZER, isinstance(state, dict) and isinstance(state.get("state"), dict)
         and all(isinstance(one, dict) for one in state["state"].values())
         and _are_groups(state.get("param_groups"))),
        ("run", _has_names(details["run"]) and _is_plain(details["run"])),
        ("key_fingerprint", isinstance(details["key_fingerprint"], str)),
        ("account", _are_parts(details.get("account", {}))),
        ("steps", _is_count(details["steps"])),
        ("sampler", details["sampler"] is None or _is_sampler(details["sampler"])),
        ("start", isinstance(details["start"], list | tuple) and len(details["start"]) == 2
         and all(map(_is_count, details["start"]))),
        ("other_batches", _is_count(details.get("other_batches", 0))),
        ("certificate", _is_certificate(details.get("certificate"))),
        ("noise_multiplier", _is_number(details["noise_multiplier"])),
        ("max_grad_norm", all(map(_is_number, limits)) if isinstance(limits, list | tuple)
         else _is_number(limits)),
        ("expected_batch_size", _is_number(details.get("expected_batch_size", 1.0))),
        ("loss_reduction", details.get("loss_reduction", "mean") in ("mean", "sum")),
        ("units", isinstance(details.get("units", ""), str)),
        ("random", isinstance(random, list) and all(map(is_random_state, random))),
        *((name, _has_names(saved.get(name, {}))) for name in SCHEDULERS),
    ):  # fmt: skip
        if not right:
            raise damaged(path, f"{name} is not what a save writes")
    counted = sum(steps for *_, steps in account["history"])
    if counted < details["steps"]:
        raise damaged(
            path, f"its account has {counted} steps, and the run has taken {details['steps']}"
        )


def _has_names(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(name, str) for name in entry)


def _is_plain(entry: Any) -> bool:
    if isinstance(entry, list | tuple):
        return all(map(_is_plain, entry))
    if isinstance(entry, dict):
        return all(map(_is_plain, entry.values()))
    return entry is None or isinstance(entry, str | int | float)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_certificate(x: Any) -> bool:
    return x is None or (isinstance(x, list) and len(x) == 4 and all(map(_is_count, x)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_history(history: Any) -> bool:
    return isinstance(history, list) and all(
        isinstance(entry, list | tuple) and len(entry) == 3
        and all(map(_is_number, entry)) and entry[1] <= 1 and _is_count(entry[2])
        for entry in history
    )  # fmt: skip


def _are_parts(parts: Any) -> bool:
    return _has_names(parts) and all(
        isinstance(part, list | tuple) and len(part) == 2
        and _is_count(part[0]) and _is_history(part[1])
        for part in parts.values()
    )  # fmt: skip


def _is_sampler(state: Any) -> bool:
    counts = ("position", "epoch_end", "num_samples")
    return (
        _has_names(state)
        and all(_is_count(state.get(name)) for name in counts)
        and _is_number(state.get("sample_rate"))
    )


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        _has_names(group) and isinstance(group.get("params"), list) for group in groups
    )


def check_contents(contents: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """Raises ValueError for entries that a load would refuse; skips tensors, so it is cheap."""
    clash = sorted(set(extra) & RESERVED)
    if clash:
        raise ValueError(f"checkpoint_dict has {', '.join(clash)}, which are written here: rename")
    for name, entry in contents.items():
        buffer = BytesIO()
        try:
            torch.save(tree_map_only(Tensor, lambda _: torch.empty(0), entry), buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"{name} holds something that cannot be loaded without executing code: give "
                "tensors, numbers, strings, None, and lists, tuples or dicts of them"
            ) from error


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
