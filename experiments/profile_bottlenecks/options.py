"""The command line of `experiments.profile_bottlenecks`, and what its options become."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.llama_fsdp.network import SHAPES, without_token
from experiments.llama_fsdp.results import Settings
from lm.runtime import Hardware, invocation, is_first_of_host, typed_command
from measure.command_line import Parser, check_numbers

PROGRAM = "experiments.profile_bottlenecks"
ON_GPU, ON_CPU = (1024, 2048, 4096, 8192, 16_384), (64, 128, 256, 512, 1024)
POSITIVE = ("seq_lengths", "batch_size", "num_iter", "num_processes", "timeout", "memory_limit_gb")
DESCRIPTION = """\
What bounds private training of a Llama under FSDP2: communication, memory, norms or the host.

For each sequence length: time of forward, first backward, norms, coefficients, second backward,
sums, collectives, noise and optimizer, each layer's norm, memory, and the exponent with which they
grow with the length. The mode follows from two flags: ghost, --use-flash: flash, --bookkeeping:
bookkeeping, both: flash_bookkeeping. The results folder receives

    summary.txt        tables, exponents with their intervals, the verdict
    bottlenecks.png    the phases over the length, and the verdict
    verdict.json       bounds and exponents as data
    report.html        tables, phases, the picture and where they come from, in one file
    results.jsonl      a line a length: every time, from which a rerun goes on
"""
EXAMPLES = """\
examples:
  python -m experiments.profile_bottlenecks --use-flash --bookkeeping
      the 1B shape on all GPUs, 1024 to 16384 tokens; the tiny one on a CPU, 64 to 1024
  python -m experiments.profile_bottlenecks --cpu --seq-lengths 32 64 128 --num-processes 1
  python -m experiments.profile_bottlenecks --model-name llama-3.1-8b --memory-limit-gb 80
  torchrun --nproc_per_node=4 -m experiments.profile_bottlenecks --use-flash --bookkeeping
"""


def parser() -> Parser:
    made = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES, speaks=is_first_of_host)
    add = made.add_argument
    add(
        "--seq-lengths", nargs="+", type=int, metavar="T",
        help="tokens a sample: each is measured, and growths are fitted to three or more (default: "
        f"{' '.join(map(str, ON_GPU))}; without a GPU {' '.join(map(str, ON_CPU))})",
    )  # fmt: skip
    add(
        "--batch-size", type=int, default=4, metavar="B",
        help="samples a rank and step: more of them take more memory, and share what a step costs "
        "whatever its batch (default: 4)",
    )  # fmt: skip
    add(
        "--use-flash", action="store_true",
        help="norms and sums by fused kernels; without a GPU these run in plain PyTorch, and "
        "results say so (default: plain PyTorch)",
    )  # fmt: skip
    add(
        "--bookkeeping", action="store_true",
        help="one backward, which keeps what the sums need and so takes memory (default: two)",
    )  # fmt: skip
    add(
        "--cpu", action="store_true",
        help="run on the CPU (default: on all GPUs; on the CPU where there is none)",
    )  # fmt: skip
    add(
        "--model-name", metavar="NAME",
        help=f"a built-in shape with random weights ({', '.join(SHAPES)}), or a Hugging Face name "
        "or folder with its weights (default: llama-3.2-1b; without a GPU tiny)",
    )  # fmt: skip
    add(
        "--num-iter", type=int, default=6, metavar="N",
        help="timed steps a length, with profiling and again without (default: 6)",
    )  # fmt: skip
    add(
        "--warmup-iter", type=int, default=3, metavar="N",
        help="steps before them, which are not timed: first ones are slower; with 0 it is not "
        "said what profiling costs (default: 3)",
    )  # fmt: skip
    add(
        "--norm-algorithm", choices=("auto", "input_length", "width"), default="auto",
        help="how fused kernels take the norms of linear layers: summing over tokens "
        "(input_length), from Gram matrices (width), or what is cheaper for each (default: auto)",
    )  # fmt: skip
    add(
        "--clipping", choices=("flat", "per_layer"), default="flat",
        help="one norm and threshold for all parameters, or one a module (default: flat)",
    )  # fmt: skip
    add(
        "--memory-limit-gb", type=float, metavar="G",
        help="GiB that a rank may use: the verdict judges memory by it, nothing enforces it "
        "(default: the GPU's; none on a CPU)",
    )  # fmt: skip
    add(
        "--output-dir", type=Path, metavar="DIR",
        help="receives the results; an existing one of the same options resumes "
        "(default: a new results/bottlenecks_YYYYMMDD_HHMMSS)",
    )  # fmt: skip
    add(
        "--num-processes", type=int, metavar="N",
        help="ranks, unless torchrun says it (default: one a GPU, two on a CPU)",
    )  # fmt: skip
    add(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds without progress after which a length is given up (default: 600)",
    )  # fmt: skip
    for name, kind in (("--length", int), ("--output", Path)):  # one length, by the sweep
        add(name, type=kind, help=argparse.SUPPRESS)
    return made


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exit with status 2 and one line for what is wrong."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        check_numbers(options, POSITIVE, ("warmup_iter",))
    except ValueError as error:
        made.error(str(error))
    lengths = options.seq_lengths or []
    if twice := sorted({n for n in lengths if lengths.count(n) > 1}):
        made.error(f"--seq-lengths {' '.join(map(str, twice))}: given twice, give each once")
    if options.norm_algorithm != "auto" and not options.use_flash:
        made.error("--norm-algorithm is for fused kernels: give --use-flash too")
    words = [without_token(w) for w in (sys.argv[1:] if arguments is None else arguments)]
    options.typed = typed_command(["-m", PROGRAM], words)
    return options


def complete(options: argparse.Namespace, hardware: Hardware) -> None:
    """Defaults that depend on the machine."""
    on_gpu = hardware.device_type == "cuda"
    options.model_name = options.model_name or ("llama-3.2-1b" if on_gpu else "tiny")
    options.seq_lengths = sorted(options.seq_lengths or (ON_GPU if on_gpu else ON_CPU))
    stamp = invocation()[: len("YYYYMMDD_HHMMSS")]
    options.output_dir = options.output_dir or Path("results") / f"bottlenecks_{stamp}"


def mode_of(options: argparse.Namespace) -> str:
    """As `experiments.llama_fsdp` calls it."""
    if options.use_flash:
        return "flash_bookkeeping_fsdp" if options.bookkeeping else "flash_fsdp"
    return "bookkeeping_fsdp" if options.bookkeeping else "ghost_fsdp"


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(
        model_name=options.model_name, batch_size=options.batch_size, num_iter=options.num_iter,
        warmup_iter=options.warmup_iter, learning_rate=1e-5, sigma=1.0, max_grad_norm=1.0,
        clipping=options.clipping, train_embedding=False, seed=0, timeout_s=options.timeout,
        enable_profiling=True, norm_algorithm=options.norm_algorithm,
    )  # fmt: skip


def cell_command(options: argparse.Namespace, length: int, output: Path) -> list[str]:
    found = [sys.executable, "-m", PROGRAM, "--length", str(length), "--output", str(output)]
    taken = (
        "model_name", "batch_size", "num_iter", "warmup_iter", "norm_algorithm", "clipping",
        "timeout",
    )  # fmt: skip
    for name in taken:
        found += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    flags = ("use_flash", "bookkeeping", "cpu")
    return found + ["--" + name.replace("_", "-") for name in flags if getattr(options, name)]
