"""Whole programs to start from: `python -m ddp_by_hand.examples.private_text`."""

from ddp_by_hand.lm.interrupt import begin_program

begin_program()
