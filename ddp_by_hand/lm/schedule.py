"""Warmup as pure functions of the step, without state that a checkpoint must contain.

The learning rate rises linearly from 0 at step 0 to its peak at `warmup_steps` and stays there
(the warmup of Goyal et al. 2017, "Accurate, Large Minibatch SGD"). The total gradient norm is
clipped to `MAX_WARMUP_GRADIENT_NORM` in warmup steps only.
"""

PEAK_LEARNING_RATE = 1e-3
MAX_WARMUP_GRADIENT_NORM = 1.0


def learning_rate(step: int, warmup_steps: int, peak: float = PEAK_LEARNING_RATE) -> float:
    """Returns the learning rate of a step, counted from 0: peak · min(1, step / warmup_steps).

    `warmup_steps=0` gives `peak` at once. Raises ValueError for a negative argument.
    """
    if peak < 0:
        raise ValueError(f"peak is {peak}: give a learning rate of 0 or more")
    return peak * step / warmup_steps if in_warmup(step, warmup_steps) else peak


def in_warmup(step: int, warmup_steps: int) -> bool:
    """Returns whether the step, counted from 0, is one of the first `warmup_steps` (clipped ones).

    Raises ValueError for a negative argument.
    """
    if step < 0:
        raise ValueError(f"step is {step}: steps are counted from 0, give 0 or more")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}: give 0 (no warmup) or more")
    return step < warmup_steps
