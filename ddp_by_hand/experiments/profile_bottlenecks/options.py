"""The command line of `experiments.profile_bottlenecks`, and what its options become."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_by_hand.experiments.llama_fsdp.network import SHAPES
from ddp_by_hand.experiments.llama_fsdp.results import GridCell
from ddp_by_hand.measure.options import not_negative, option, positive
from dp_clipping.arguments.checks import CLIPPINGS
from dp_clipping.planning.plan import NORM_ALGORITHMS

PROGRAM = "ddp_by_hand.experiments.profile_bottlenecks"
ON_GPU, ON_CPU = (1024, 2048, 4096, 8192, 16_384), (64, 128, 256, 512, 1024)
DESCRIPTION = """\
Finds what bounds private training of a Llama under FSDP2: communication, memory, norms, the host.

For each sequence length: time of forward, first backward, norms, coefficients, second backward,
sums, collectives, noise and optimizer, each layer's norm, memory, and the exponent with which they
grow with the length. The mode follows from two flags: ghost, --use-flash: flash, --bookkeeping:
bookkeeping, both: flash_bookkeeping. The results folder receives

    summary.txt        tables, exponents with their intervals, the verdict
    bottlenecks.png    the phases over the length, and the verdict
    verdict.json       bounds and exponents as data
    report.html        tables, phases, the picture and where they come from, in one file
    results.jsonl      one line per length: every time; a rerun continues from it
"""
EXAMPLES = """\
examples:
  python -m ddp_by_hand.experiments.profile_bottlenecks --use-flash --bookkeeping
      the 1B shape on all GPUs, 1024 to 16384 tokens; the tiny one on a CPU, 64 to 1024
  python -m ddp_by_hand.experiments.profile_bottlenecks --cpu --seq-lengths 32 64 --num-processes 1
  python -m ddp_by_hand.experiments.profile_bottlenecks --model-name llama-3.1-8b \
      --memory-limit-gb 80
  torchrun --nproc_per_node=4 -m ddp_by_hand.experiments.profile_bottlenecks --use-flash \
      --bookkeeping
"""


# fmt: off
@dataclass(frozen=True)
class Options:
    seq_lengths: tuple[int, ...] | None = option(None, metavar="T", check=positive, help=(
        "tokens per sample: each is measured, and growths are fitted to three or more (default: "
        f"{' '.join(map(str, ON_GPU))}; without a GPU {' '.join(map(str, ON_CPU))})"))
    batch_size: int = option(4, metavar="B", check=positive, help=(
        "samples per rank and step: more of them take more memory, and share what a step costs "
        "whatever its batch"))
    use_flash: bool = option(False, help=(
        "norms and sums by fused kernels; without a GPU these run in plain PyTorch, and "
        "results say so (default: plain PyTorch)"))
    bookkeeping: bool = option(False,
        help="one backward, which keeps what the sums need and so takes memory (default: two)")
    cpu: bool = option(False,
        help="run on the CPU (default: on all GPUs; on the CPU where there is none)")
    model_name: str | None = option(None, metavar="NAME", help=(
        f"a built-in shape with random weights ({', '.join(SHAPES)}), or a Hugging Face name "
        "or folder with its weights (default: llama-3.2-1b; without a GPU tiny)"))
    num_iter: int = option(6, metavar="N", check=positive,
        help="timed steps per length, with profiling and again without")
    warmup_iter: int = option(3, metavar="N", check=not_negative, help=(
        "untimed steps before them; first steps are slower. With 0 the cost of profiling is "
        "not reported"))
    norm_algorithm: str = option("auto", choices=NORM_ALGORITHMS, help=(
        "how fused kernels take the norms of linear layers: summing over tokens "
        "(input_length), from Gram matrices (width), or what is cheaper for each"))
    clipping: str = option("flat", choices=CLIPPINGS,
        help="one norm and threshold for all parameters, or one per module")
    memory_limit_gb: float | None = option(None, metavar="G", check=positive, help=(
        "GiB that a rank may use: the verdict judges memory by it, nothing enforces it "
        "(default: the GPU's; none on a CPU)"))
    output_dir: Path | None = option(None, metavar="DIR", help=(
        "receives the results; an existing one of the same options resumes "
        "(default: a new results/bottlenecks_YYYYMMDD_HHMMSS)"))
    num_processes: int | None = option(None, metavar="N", check=positive,
        help="number of ranks, unless torchrun sets it (default: one per GPU, two on a CPU)")
    timeout: float = option(600.0, metavar="S", check=positive,
        help="seconds without progress after which a length is given up")
    length: int | None = option(None, SUPPRESS)
    output: Path | None = option(None, SUPPRESS)
# fmt: on

    def __post_init__(self) -> None:
        lengths = self.seq_lengths or ()
        if twice := sorted({n for n in lengths if lengths.count(n) > 1}):
            raise ValueError(
                f"--seq-lengths {' '.join(map(str, twice))}: given twice, give each once"
            )
        if self.norm_algorithm != "auto" and not self.use_flash:
            raise ValueError("--norm-algorithm is for fused kernels: give --use-flash too")

    @property
    def mode(self) -> str:
        """Returns the mode's name in `experiments.llama_fsdp`."""
        if self.use_flash:
            return "flash_bookkeeping_fsdp" if self.bookkeeping else "flash_fsdp"
        return "bookkeeping_fsdp" if self.bookkeeping else "ghost_fsdp"

    def for_cell(self, cell: GridCell, output: Path) -> Options:
        """Returns the options of one length's command."""
        none = dict.fromkeys(("seq_lengths", "output_dir", "num_processes", "memory_limit_gb"))
        return replace(self, length=cell.seq_length, output=output, **none)
