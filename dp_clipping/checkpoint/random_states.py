"""The random states of a run, with which dropout and augmentation go on as they were.

Noise and batches do not come from them: they have keys of their own.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dp_clipping.checkpoint.run import PrivateRun, gathered

NAMES = ("cpu", "numpy", "python", "cuda")
TWISTER_BYTES = 4 * 624 + 3 * 8  # words, place and flag, normal number
PYTHON_VERSION = 3  # of the state of Python's generator, the same since Python 3.2


def random_states(run: PrivateRun) -> list[dict[str, Tensor]]:
    """Returns the random states of each rank, so that dropout and augmentation go on as they were.

    They are torch's, NumPy's and Python's global ones, uint8; not that of a generator of the
    user's own.
    """
    states = {"cpu": torch.get_rng_state(), "numpy": _numpy_state(), "python": _python_state()}
    if run.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(run.device)
    joined = torch.cat([*states.values()]).to(run.device)
    lengths = [len(state) for state in states.values()]
    of_ranks = gathered(run, joined)
    return [dict(zip(states, x.cpu().split(lengths), strict=True)) for x in of_ranks]


def set_random_state(run: PrivateRun, states: list[dict[str, Tensor]]) -> None:
    """Restores this rank's random state, if it was saved from as many ranks as there are now."""
    if len(states) != run.world_size:
        return
    state = states[run.rank]
    # Not views of one another: torch reads the storage.
    torch.set_rng_state(state["cpu"].clone())
    if "cuda" in state and run.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), run.device)
    if "numpy" in state:  # in files of earlier versions they are not
        words, (place, has_normal), normal = _words_of(state["numpy"])
        if words.any():
            np.random.set_state(("MT19937", words, place, has_normal, normal))
        words, (place, has_normal), normal = _words_of(state["python"])
        inner = (*map(int, words), place)
        random.setstate((PYTHON_VERSION, inner, normal if has_normal else None))


def is_random_state(states: Any) -> bool:
    """Returns whether these are states that `set_random_state` can restore."""
    if not (isinstance(states, dict) and {"cpu"} <= states.keys() <= set(NAMES)):
        return False
    if not all(isinstance(x, Tensor) and x.dtype == torch.uint8 for x in states.values()):
        return False
    if any(len(states[name]) != TWISTER_BYTES for name in ("numpy", "python") if name in states):
        return False
    try:
        torch.Generator().set_state(states["cpu"].clone())
    except RuntimeError:
        return False
    return True


def _numpy_state() -> Tensor:
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    if state["bit_generator"] != "MT19937":  # the user's choice, of which zeros say nothing
        return _bytes_of([0] * 624, (0, 0), 0.0)
    return _bytes_of(inner["key"], (inner["pos"], state["has_gauss"]), state["gauss"])


def _python_state() -> Tensor:
    _, (*words, place), normal = random.getstate()
    return _bytes_of(words, (place, normal is not None), normal or 0.0)


def _bytes_of(words: Any, numbers: Any, normal: float) -> Tensor:
    """Returns the state of a Mersenne twister: 624 words, place, and a normal number it may have.

    NumPy's and Python's generators are both of this kind.
    """
    parts = np.asarray(words, "<u4"), np.asarray(numbers, "<i8"), np.asarray([normal], "<f8")
    return torch.frombuffer(bytearray(b"".join(x.tobytes() for x in parts)), dtype=torch.uint8)


def _words_of(state: Tensor) -> tuple[Any, tuple[int, int], float]:
    content = state.numpy().tobytes()
    words, numbers = np.frombuffer(content[:-24], "<u4"), np.frombuffer(content[-24:-8], "<i8")
    return words, (int(numbers[0]), int(numbers[1])), float(np.frombuffer(content[-8:], "<f8")[0])
