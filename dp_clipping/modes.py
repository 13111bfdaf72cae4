"""The modes by name, as `grad_sample_mode` and `--clipping` take them.

| mode | backwards | norms |
| --- | --- | --- |
| `no_dp` | one | none: the baseline |
| `per_sample` | one | of every per-sample gradient, all materialised: the plain reference |
| `ghost` | two | Gram matrices in 16 bit, else one sample's gradient at a time; plain PyTorch |
| `flash` | two | fused kernels (`dp_clipping.step.sums.fused`); without a GPU as `ghost` |
| `bookkeeping` | one, then a weighted sum of what was kept | plain PyTorch |
| `flash_bookkeeping` | one, then a weighted sum | fused; without a GPU as `bookkeeping` |
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

MODES = ("no_dp", "per_sample", "ghost", "flash", "bookkeeping", "flash_bookkeeping")
UNPROTECTED = ("no_dp", "none")  # two names of one mode
DEFAULT_MODE = "flash_bookkeeping"
REFERENCE_MODE = {"flash": "ghost", "flash_bookkeeping": "bookkeeping"}

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """Settings of a mode: how many backwards it runs, and what it stores.

    Attributes:
        two_passes: norms in one backward, sums in a second one.
        dense_always: materialise every per-sample gradient.
        clipping_function, gamma: see `dp_clipping.clipping.coefficients`.
        fused: on fused kernels where they run (`step.fused`), which the rest is for.
        per_layer: every module is a clipping group of its own.
        norm_algorithm: `auto`, or the one of `planning.plan` that all linear layers take.
        memory_budget: bytes that linear layers may keep from backward to their sums; None: what an
            ordinary step would hold there.
        tile_size: rows and columns of the kernels' tiles; None: chosen by the kernels.
    """

    two_passes: bool = False
    dense_always: bool = False
    clipping_function: str = "abadi"
    gamma: float = 0.01
    fused: bool = False
    per_layer: bool = False
    norm_algorithm: str = "auto"
    memory_budget: int | None = None
    tile_size: int | None = None

    @property
    def may_run_twice(self) -> bool:
        """Returns whether sums may take a second backward."""
        return self.two_passes or self.memory_budget is not None


def policy_of(mode: str, **options: Any) -> Policy | None:
    """Returns the policy of a mode; None for `no_dp`. Options are `Policy`'s other fields."""
    if mode in UNPROTECTED:
        return None
    return Policy(
        two_passes=mode in ("ghost", "flash"),
        dense_always=mode == "per_sample",
        fused=mode in REFERENCE_MODE,
        **options,
    )


@cache
def say_plain(mode: str) -> None:
    """Logs once, on the first rank, that the mode runs without its kernels."""
    if not (dist.is_initialized() and dist.get_rank()):
        LOG.info(
            f"{mode} runs as {REFERENCE_MODE[mode]}, in plain PyTorch: its fused kernels need a "
            "CUDA device, Triton, and parameters in float32, bfloat16 or float16"
        )
