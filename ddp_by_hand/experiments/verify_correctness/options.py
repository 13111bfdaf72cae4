"""The command line of `experiments.verify_correctness`."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_by_hand.experiments.verify_correctness.cases import DTYPES, NETWORKS, PRIVATE_MODES
from ddp_by_hand.measure.options import option, positive


# fmt: off
@dataclass(frozen=True)
class Options:
    """Command-line options; `remarks` are further lines for the result."""

    use_fsdp: bool = option(False, group="what to check", help=(
        "FSDP2: ranks have shards of the parameters and different samples, one rank none "
        "(default: not sharded)"))
    use_tp: bool = option(False, help=(
        "tensor parallel: ranks have parts of each layer and the same samples; with "
        "--use-fsdp two ranks each, and at least four in all. Each case runs three times, as norms "
        "travel: sync, async, layerwise (default: not split)"))
    modes: tuple[str, ...] = option(PRIVATE_MODES, choices=PRIVATE_MODES, unique=True,
        metavar="MODE", help=(
        f"what is checked: any of {', '.join(PRIVATE_MODES)} (default: all)"))
    networks: tuple[str, ...] = option(tuple(NETWORKS), choices=tuple(NETWORKS), unique=True,
        metavar="NAME", help=(
        "on what: transformer (ddp_by_hand/lm/model.py), llama (Hugging Face's, where transformers "
        "is installed) (default: both)"))
    dtype: str = option("float32", choices=tuple(DTYPES),
        help="dtype of the parameters; tolerances follow from it")

    backend: str = option("auto", group="run and output", choices=("auto", "gloo", "nccl"),
        help="nccl: GPUs; gloo: the CPU; auto: GPUs where there are some")
    num_processes: int | None = option(None, metavar="N", check=positive, help=(
        "ranks, unless torchrun sets them (default: one; with --use-fsdp or --use-tp one per GPU "
        "or two on a CPU, with both at least four)"))
    timeout: float = option(600.0, metavar="S", check=positive,
        help="seconds without progress after which several ranks give up")
    enable_profiling: bool = option(False, help=(
        "also each mode's phases, in milliseconds, after the result: what "
        "DP_CLIPPING_PROFILE=1 times in any private step (default: off, and nothing is timed)"))
    verbose: bool = option(False, help=(
        "also the norms that each rank has before and after ranks exchange them "
        "(default: tables only)"))
    remarks: tuple[str, ...] = ()
# fmt: on
