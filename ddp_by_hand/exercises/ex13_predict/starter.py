"""Exercise 13, predict: where does a variant stop paying?

What
    On two GPUs you can measure. On a thousand you must predict, before the machine is paid for.
    Write the three functions below: pure functions, no tensors, no ranks. Together they are a small
    `experiments.simulate`.

        computing       ██████ ████████ █████·····████       · waits: exposed
        communicating         ░░░░░░░░░ ░░░░░░░░░░           one all-reduce after another
                              └ beside each other, both are slower

Why it matters
    Latency grows with the number of ranks and bandwidth does not shrink: so one variant stops
    paying at 8 GPUs and another at 1,024, on the same machine.

Rules
    - A ring all-reduce has 2 (W - 1) hops of `latency` seconds, and sends 2 (W - 1) / W of its
      bytes at `bandwidth` bytes per second. On one rank it takes no time.
    - Backward computes its pieces in order. After piece i, collective i joins a queue; the queue is
      worked off one at a time, in order. The step ends when all is computed and sent.
    - While a piece and a collective are under way at the same time, computation advances at
      1 / slowdown of its speed. Communication is not slowed down here.
    - Efficiency on W ranks is the step without communication over the step with it. A variant pays
      up to the largest W of `counts` before the first one whose efficiency is below `limit`; 0 if
      the first is already below.

Check it        ddp-exercise check predict my_predict.py
Then read       ddp_by_hand/experiments/simulate/step.py, where communication is slowed down, too
"""

from collections.abc import Callable, Sequence


def all_reduce_seconds(nbytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Returns what a ring all-reduce takes."""
    raise NotImplementedError("latency of all hops, and the bytes over the bandwidth")


def step_seconds(pieces: Sequence[float], sends: Sequence[float], slowdown: float) -> float:
    """Returns how long backward lasts, with its communication.

    Args:
        pieces: seconds of computation, alone, before each collective may start.
        sends: seconds of each collective; as many as there are pieces.
        slowdown: the factor by which communication beside it slows computation, 1 or more.
    """
    raise NotImplementedError("go from event to event: the next end of a piece or of a collective")


def last_that_pays(step_on: Callable[[int], float], counts: Sequence[int], limit: float) -> int:
    """Returns the largest number of ranks up to which a variant pays.

    Args:
        step_on: number of ranks -> seconds of a step; on one rank nothing is sent.
        counts: numbers of ranks to try, ascending.
        limit: the smallest efficiency that pays.
    """
    raise NotImplementedError("compare step_on(1) with step_on(W)")
