"""The parts of `benchmark_ddp.py`: options, correctness gate, timed rounds, profiles, report."""

from lm.interrupt import end_quietly_when_interrupted

end_quietly_when_interrupted()
