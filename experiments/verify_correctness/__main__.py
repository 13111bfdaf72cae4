#!/usr/bin/env python3
"""Is private training right on this machine?

Every mode takes private steps without noise on small networks with random weights. A reference
takes one sample after the other through an ordinary backward in float64. Norms and clipped
gradients must agree, and no sample may add more than C. One row a case:

    norm       largest relative error of a sample's norm
    gradient   largest relative error of a parameter's clipped sum; the parameter is at the end
               (2e-05 is meant: thresholds have that margin for the rounding of a norm)
    adds / C   the most that one sample adds to the sum: 1.000001 at most
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from measure.command_line import Parser, check_numbers, ending_quietly, is_alone, refuse

PROGRAM = "experiments.verify_correctness"
EXAMPLES = """\
exit status: 0 if all cases agree, 1 if one does not, 2 for a wrong option

examples:
  python -m experiments.verify_correctness
      one process, on the GPU if there is one
  python -m experiments.verify_correctness --use-fsdp
      FSDP2 on all GPUs with NCCL, or on two CPU processes with gloo
  python -m experiments.verify_correctness --use-fsdp --use-tp --verbose
      a mesh of data x 2 tensor-parallel ranks, and what each rank knows of the norms
  python -m experiments.verify_correctness --modes ghost bookkeeping --enable-profiling
      two modes, and which phases their steps have
  torchrun --nproc_per_node=4 -m experiments.verify_correctness --use-tp
      on the ranks of a launcher; without --use-fsdp and --use-tp they are replicas (ddp_bucketed)
"""


def parser() -> Parser:
    from experiments.verify_correctness.cases import DTYPES, NETWORKS, PRIVATE_MODES
    from lm.runtime import is_first_of_host

    made = Parser(prog=PROGRAM, description=__doc__, epilog=EXAMPLES, speaks=is_first_of_host)
    group = made.add_argument_group("what to check")
    group.add_argument(
        "--use-fsdp", action="store_true",
        help="FSDP2: ranks have shards of the parameters and different samples, one rank none "
        "(default: not sharded)",
    )  # fmt: skip
    group.add_argument(
        "--use-tp", action="store_true",
        help="tensor parallel: ranks have parts of each layer and the same samples; with "
        "--use-fsdp two ranks each, and at least four in all. Each case runs three times, as norms "
        "travel: sync, async, layerwise (default: not split)",
    )  # fmt: skip
    group.add_argument(
        "--modes", nargs="+", choices=PRIVATE_MODES, default=list(PRIVATE_MODES), metavar="MODE",
        help=f"what is checked: any of {', '.join(PRIVATE_MODES)} (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), metavar="NAME",
        help="on what: transformer (lm/model.py), llama (Hugging Face's, where transformers is "
        "installed) (default: both)",
    )  # fmt: skip
    group.add_argument(
        "--dtype", choices=list(DTYPES), default="float32",
        help="of the parameters; tolerances follow from it (default: float32)",
    )  # fmt: skip
    group = made.add_argument_group("run and output")
    group.add_argument(
        "--backend", choices=("auto", "gloo", "nccl"), default="auto",
        help="nccl: GPUs; gloo: the CPU; auto: GPUs where there are some (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--num-processes", type=int, metavar="N",
        help="ranks, unless torchrun says it (default: one; with --use-fsdp or --use-tp one a GPU "
        "or two on a CPU, with both at least four)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds without progress after which several ranks give up (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--enable-profiling", action="store_true",
        help="also each mode's phases, in milliseconds, after the result: what "
        "DP_CLIPPING_PROFILE=1 times in any private step (default: off, and nothing is timed)",
    )  # fmt: skip
    group.add_argument(
        "--verbose", action="store_true",
        help="also the norms that each rank has before and after ranks exchange them, and the "
        "worst parameter of each mode (default: tables only)",
    )  # fmt: skip
    return made


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exit with status 2 and one line for what is wrong."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        check_numbers(options, ("num_processes", "timeout"))
    except ValueError as error:
        made.error(str(error))
    options.modes = list(dict.fromkeys(options.modes))
    options.networks = list(dict.fromkeys(options.networks))
    return options


@ending_quietly(speaks=is_alone)
def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a case is wrong, 2 for bad input, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Imported here: it takes seconds, in which Ctrl-C is to be as quiet as later.
    from experiments.verify_correctness.run import prepare, run
    from lm.runtime import is_first_of_host

    options = parse(arguments)
    try:
        hardware = prepare(options)
    except ValueError as error:
        return refuse(PROGRAM, error, is_first_of_host())
    return run(options, hardware, [sys.executable, "-m", PROGRAM, *arguments])


if __name__ == "__main__":
    sys.exit(main())
