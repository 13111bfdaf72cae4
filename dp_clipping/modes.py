"""The modes by name, as `grad_sample_mode` and `--clipping` take them.

| mode | backwards | norms |
| --- | --- | --- |
| `no_dp` | one | none: the baseline |
| `per_sample` | one | of every per-sample gradient, all materialised: the plain reference |
| `ghost` | two | Gram matrices in 16 bit, else one sample's gradient at a time; plain PyTorch |
| `flash` | two | fused kernels (`dp_clipping.fused`); without a GPU as `ghost` |
| `bookkeeping` | one, then a weighted sum of what was kept | plain PyTorch |
| `flash_bookkeeping` | one, then a weighted sum | fused; without a GPU as `bookkeeping` |
"""

import logging
from typing import Any

import torch.distributed as dist

from dp_clipping.session import Policy

MODES = ("no_dp", "per_sample", "ghost", "flash", "bookkeeping", "flash_bookkeeping")
DEFAULT_MODE = "flash_bookkeeping"
PLAIN_TWIN = {"flash": "ghost", "flash_bookkeeping": "bookkeeping"}

LOG = logging.getLogger(__name__)
_said: set[str] = set()


def policy_of(mode: str, **options: Any) -> Policy | None:
    """What the mode does; None for `no_dp`. Options are `Policy`'s others.

    Raises:
        ValueError: for an unknown mode, with the known ones.
    """
    mode = "no_dp" if mode == "none" else mode
    if mode not in MODES:
        raise ValueError(f"grad_sample_mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
    if mode == "no_dp":
        return None
    return Policy(
        two_passes=mode in ("ghost", "flash"),
        dense_always=mode == "per_sample",
        fused=mode in PLAIN_TWIN,
        **options,
    )


def say_plain(mode: str) -> None:
    """Once, on the first rank: the mode runs without its kernels."""
    if mode in _said or (dist.is_initialized() and dist.get_rank() > 0):
        return
    _said.add(mode)
    LOG.warning(
        "%s runs as %s, in plain PyTorch: its fused kernels need a CUDA device, Triton, and "
        "parameters in float32, bfloat16 or float16",
        mode,
        PLAIN_TWIN[mode],
    )
