"""The modes by name, as `grad_sample_mode` and `--clipping` take them.

| mode | backwards | norms |
| --- | --- | --- |
| `no_dp` | one | none: the baseline |
| `per_sample` | one | of every per-sample gradient, all materialised: the plain reference |
| `ghost` | two | Gram matrices in 16 bit, else one sample's gradient at a time; plain PyTorch |
| `flash` | two | as `ghost`, for now |
| `bookkeeping` | one, then a weighted sum of what was kept | plain PyTorch |
| `flash_bookkeeping` | one, then a weighted sum | as `bookkeeping`, for now |
"""

import logging

from dp_clipping.session import Policy

MODES = ("no_dp", "per_sample", "ghost", "flash", "bookkeeping", "flash_bookkeeping")
DEFAULT_MODE = "flash_bookkeeping"
PLAIN_TWIN = {"flash": "ghost", "flash_bookkeeping": "bookkeeping"}

logger = logging.getLogger("dp_clipping")
_said: set[str] = set()


def policy_of(mode: str, clipping_function: str, gamma: float) -> Policy | None:
    """What the mode does; None for `no_dp`.

    Raises:
        ValueError: for an unknown mode, with the known ones.
    """
    mode = "no_dp" if mode == "none" else mode
    if mode not in MODES:
        raise ValueError(f"grad_sample_mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
    if mode in PLAIN_TWIN and mode not in _said:
        _said.add(mode)
        logger.warning(
            "%s runs as %s, in plain PyTorch: its fused kernels are not built yet",
            mode,
            PLAIN_TWIN[mode],
        )
    mode = PLAIN_TWIN.get(mode, mode)
    if mode == "no_dp":
        return None
    return Policy(
        two_passes=mode == "ghost",
        dense_always=mode == "per_sample",
        clipping_function=clipping_function,
        gamma=gamma,
    )
