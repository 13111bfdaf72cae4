"""Commands that measure, or verify, private training: `python -m ddp_by_hand.experiments.NAME`."""

from ddp_by_hand.lm.interrupt import begin_program

begin_program()
