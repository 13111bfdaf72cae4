"""The parts of `benchmark_ddp.py`: options, correctness gate, timed rounds, profiles, report."""

from ddp_by_hand.lm.interrupt import begin_program

begin_program()
