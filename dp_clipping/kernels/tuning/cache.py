"""What was measured on this machine's GPUs, in files for later runs.

They lie in `$XDG_CACHE_HOME/dp_clipping` (`~/.cache/dp_clipping` without that variable), and each
holds an object of values by device, torch and Triton: what is measured depends on all three. A file
that cannot be read, or that holds something else, counts as none. Whoever takes values checks them.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import torch

from dp_clipping.files import write_atomically
from dp_clipping.kernels.tiles import triton


def path_of(name: str) -> Path:
    """Of the file that holds the values of all devices."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dp_clipping" / name


def key_of(device: torch.device) -> str:
    """What the values of a device depend on."""
    version = None if triton is None else triton.__version__
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {version}"


def read(name: str, device: torch.device) -> dict:
    """The values that are kept for a device."""
    return _object(_devices(name).get(key_of(device)))


def keep(name: str, device: torch.device, values: dict) -> None:
    """Keep them beside the device's others and those of other devices, or say why not."""
    devices, key = _devices(name), key_of(device)
    devices[key] = _object(devices.get(key)) | values
    try:
        path_of(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path_of(name), json.dumps(devices, indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"what was measured is not kept: {error}", stacklevel=2)


def _devices(name: str) -> dict:
    try:
        return _object(json.loads(path_of(name).read_bytes()))
    except (OSError, ValueError):
        return {}


def _object(content: object) -> dict:
    return content if isinstance(content, dict) else {}
