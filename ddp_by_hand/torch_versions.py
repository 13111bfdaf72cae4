"""The versions of PyTorch that `ddp`, `dp_clipping` and the programs are tested with.

They run on others too. What they need without a public name is in their files `torch_compat.py`:
an error from there names what another version does not have.
"""

import os
import warnings

import torch

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
RANGE = f"{TESTED[0]} to {TESTED[-1]}"
WARNED = "DDP_BY_HAND_WARNED_OF_TORCH"  # in the environment, which processes inherit


def warn_if_untested() -> None:
    """Warns of a version that is not among `TESTED`: once for a program, all its ranks included."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release in TESTED or WARNED in os.environ:
        return
    os.environ[WARNED] = torch.__version__
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"torch {torch.__version__} is not among the versions that this is tested with, "
            f"{RANGE}: first run `python -m ddp_by_hand.experiments.verify_correctness` (private "
            "training) or `python -m ddp_by_hand.bench` (data parallel), which compare gradients",
            stacklevel=2,
        )
