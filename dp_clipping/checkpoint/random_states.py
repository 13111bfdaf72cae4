"""The random states of a run, with which dropout and augmentation go on as they were.

Noise and batches do not come from them: they have keys of their own.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

TWISTER = np.dtype([("words", "<u4", 624), ("place and flag", "<i8", 2), ("normal", "<f8")])
PYTHON_VERSION = 3  # of the state of Python's generator, the same since Python 3.2


def states_of(device: torch.device) -> dict[str, Tensor]:
    """Returns the global random states of torch, NumPy and Python in this process, uint8."""
    states = {"cpu": torch.get_rng_state(), "numpy": _numpy_state(), "python": _python_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restores what `states_of` has returned, as far as it is there."""
    # Not views of one another: torch reads the storage.
    torch.set_rng_state(states["cpu"].clone())
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)
    if "numpy" in states:  # in files of earlier versions they are not
        words, (place, has_normal), normal = _words_of(states["numpy"])
        if words.any():
            np.random.set_state(("MT19937", words, place, has_normal, normal))
        words, (place, has_normal), normal = _words_of(states["python"])
        inner = (*map(int, words), place)
        random.setstate((PYTHON_VERSION, inner, normal if has_normal else None))


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
    state = np.array((words, numbers, normal), TWISTER)
    return torch.frombuffer(bytearray(state.tobytes()), dtype=torch.uint8)


def _words_of(state: Tensor) -> tuple[Any, tuple[int, int], float]:
    words, (place, has_normal), normal = np.frombuffer(state.numpy().tobytes(), TWISTER)[0]
    return words, (int(place), int(has_normal)), float(normal)
