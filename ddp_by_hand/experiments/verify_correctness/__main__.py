#!/usr/bin/env python3
"""Checks whether private training is right on this machine.

Every mode takes private steps without noise on small networks with random weights. A reference
takes one sample after the other through an ordinary backward in float64. Norms and clipped
gradients must agree, and no sample may add more than C. One row per case:

    norm       largest relative error of a sample's norm
    gradient   largest relative error of a parameter's clipped sum; the parameter is at the end
               (2e-05 is meant: thresholds have that margin for the rounding of a norm)
    adds / C   the most that one sample adds to the sum: 1.000001 at most
"""

from __future__ import annotations

import sys

from ddp_by_hand.experiments.verify_correctness.run import Options, prepare, run
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import as_arguments, program

PROGRAM = "ddp_by_hand.experiments.verify_correctness"
EXAMPLES = """\
exit status: 0 if all cases agree, 1 if one does not, 2 for a wrong option

examples:
  dp-verify
      one process, on the GPU if there is one
  dp-verify --use-fsdp
      FSDP2 on all GPUs with NCCL, or on two CPU processes with gloo
  dp-verify --use-fsdp --use-tp --verbose
      a mesh of data x 2 tensor-parallel ranks, and what each rank knows of the norms
  dp-verify --modes ghost bookkeeping --enable-profiling
      two modes, and which phases their steps have
  torchrun --nproc_per_node=4 -m ddp_by_hand.experiments.verify_correctness --use-tp
      on the ranks of a launcher; without --use-fsdp and --use-tp they are replicas (ddp_bucketed)
"""


@program(PROGRAM, Options, epilog=EXAMPLES)
def main(options: Options) -> int:
    """Runs the checks. Returns 1 if a case is wrong."""
    command = [sys.executable, "-m", PROGRAM, *as_arguments(options)]
    with bad_input():
        options, hardware = prepare(options)
    return run(options, hardware, command)


if __name__ == "__main__":
    sys.exit(main())
