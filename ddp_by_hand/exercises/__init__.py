"""Exercises in data-parallel training; README.md says how to work through them.

Each folder has a `starter.py`, the specification with blanks to fill in, and a `check.py`, the
properties that a solution has.
"""

from pathlib import Path

from ddp_by_hand.lm.interrupt import begin_program
from ddp_by_hand.lm.programs import program_words

begin_program()

EXERCISES: dict[str, str] = {
    "average": "ex1_average",
    "hooks": "ex2_hooks",
    "measure": "ex3_measure",
    "plan": "ex4_plan",
    "order": "ex5_order",
    "no_sync": "ex6_no_sync",
    "unused": "ex7_unused",
    "ring": "ex8_ring",
    "flat": "ex9_flat",
    "zero1": "ex10_zero1",
    "zero2": "ex11_zero2",
    "fsdp": "ex12_fsdp",
    "predict": "ex13_predict",
    "diloco": "ex14_diloco",
}
"""Name on the command line -> folder, in order of difficulty."""


def command() -> str:
    """Returns what a learner types before `start` and `check`."""
    return " ".join(program_words("ddp_by_hand.exercises"))


def starter_of(name: str) -> Path:
    return Path(__file__).parent / EXERCISES[name] / "starter.py"
