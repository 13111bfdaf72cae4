"""The file of a checkpoint: what is in it, written whole, read without executing code."""

import os
import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dp_clipping.keys import Keys, read_keys, write_keys
from measure.files import replacing

VERSION = 1
OWN = "dp_clipping"  # the entry that Opacus does not have
OWN_ENTRIES = (
    "run", "key_fingerprint", "steps", "sampler", "start", "noise_multiplier", "max_grad_norm",
    "random",
)  # fmt: skip
MODULE, OPTIMIZER = "module_state_dict", "optimizer_state_dict"
ACCOUNTANT = "privacy_accountant_state_dict"
ALWAYS = (MODULE, ACCOUNTANT)
SCHEDULERS = ("noise_scheduler_state_dict", "grad_clip_scheduler_state_dict")
RESERVED = {OWN, *ALWAYS, *SCHEDULERS, OPTIMIZER}
UNREADABLE = (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError)


def file_name(path: Any) -> Path:
    """Raises ValueError for what names no file, as a file that was opened."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"path is a {type(path).__name__}: give a file name, beside which the key has its file"
        )
    return Path(path)


def key_path(path: Path) -> Path:
    return path.with_name(path.name + ".key")


def write(path: Path, contents: dict, keys: Keys, torch_kwargs: Mapping[str, Any]) -> None:
    beside = key_path(path)
    old = read_keys(beside)
    write_keys(beside, old if keys in old else [*old, keys])
    with replacing(path) as file:
        torch.save(contents, file, **torch_kwargs)
    write_keys(beside, [keys])


def read(path: Path, torch_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if torch_kwargs.get("weights_only") is False:
        raise ValueError("weights_only=False would execute code from the checkpoint: drop it")
    options = {"map_location": "cpu", **torch_kwargs, "weights_only": True}
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        saved = torch.load(path, **options)
    except PermissionError:
        raise
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is not a whole checkpoint: it is cut short, or another kind of file"
        ) from error
    own = saved.get(OWN) if isinstance(saved, dict) else None
    if not isinstance(own, dict):
        raise ValueError(f"{path} was not written by dp_clipping's save_checkpoint")
    if own.get("version") != VERSION:
        raise ValueError(f"{path} has version {own.get('version')}, this program reads {VERSION}")
    missing = ({*ALWAYS} - {*saved}) | ({*OWN_ENTRIES} - {*own})
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it was changed after saving")
    return saved


def check_contents(contents: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """What a load would refuse is refused now; tensors are left out, which makes it cheap."""
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
    """Numbers and containers as Python's own: numpy's are not loaded without executing code."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value)
    return value.item() if hasattr(value, "item") and not isinstance(value, Tensor) else value


def given_schedulers(noise_scheduler: Any, grad_clip_scheduler: Any) -> dict[str, Any]:
    """Entry in the checkpoint -> scheduler, of those that are there."""
    both = zip(SCHEDULERS, (noise_scheduler, grad_clip_scheduler), strict=True)
    return {entry: scheduler for entry, scheduler in both if scheduler is not None}


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Without the functions of Lambda schedulers, which a load leaves alone, as in torch."""
    return {k: plain(v) for k, v in scheduler.state_dict().items() if not callable(v)}
