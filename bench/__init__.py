"""What `benchmark_ddp.py` does: options, correctness gate, timed rounds, profiles, report."""

from lm.interrupt import end_quietly_when_interrupted

end_quietly_when_interrupted()
