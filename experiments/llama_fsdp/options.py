"""The command line of `experiments.llama_fsdp`: every option with its unit, default and effect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.llama_fsdp.network import SHAPES, TOKEN, without_token
from experiments.llama_fsdp.results import MODES, Cell, Settings
from lm.runtime import invocation, is_first_of_host, typed_command
from measure.command_line import Parser, check_numbers, option

PROGRAM = "experiments.llama_fsdp"
LENGTHS = (1024, 2048, 4096)
POSITIVE = (
    "seq_lengths", "seq_length", "num_iter", "rounds", "batch_size", "max_grad_norm",
    "learning_rate", "num_processes", "timeout",
)  # fmt: skip
OF_A_GRID = {"modes": list(MODES), "seq_lengths": list(LENGTHS), "rounds": 1}  # and defaults
NOT_NEGATIVE = ("warmup_iter", "sigma", "seed", "round")
DESCRIPTION = """\
What private training of a Llama under FSDP2 costs, mode by mode and length by length.

Each cell, a mode at a sequence length, is measured in processes of its own; one that runs out of
memory or fails is a row like the others. The same command with the same --output-dir goes on where
it was stopped. The results folder receives

    {mode}_seq{T}_result.json        times of every step, phases, memory, environment
    visualizations/*.png             memory, time, both against each other, ratios to no_dp
    summary.txt                      the table of all that
    report.html                      tables, pictures and where they come from, in one file
    results.jsonl                    what a rerun resumes from
"""
EXAMPLES = """\
examples:
  python -m experiments.llama_fsdp
      the 8B shape, all modes at 1024, 2048 and 4096 tokens, on all GPUs of this machine
  python -m experiments.llama_fsdp --model-name tiny --seq-lengths 32 64 --num-iter 3
      a rehearsal in a minute or two, on two CPU processes
  python -m experiments.llama_fsdp --rounds 5 --output-dir results/mine
      five interleaved rounds, whose spread says how far to trust a ratio; again: resumes
  python -m experiments.llama_fsdp --mode flash_fsdp --seq-length 2048 --output one.json
      one cell
  torchrun --nproc_per_node=8 -m experiments.llama_fsdp --modes no_dp flash_bookkeeping_fsdp
      the same under torchrun, also over several nodes
  python -m experiments.llama_fsdp --redraw results/mine
      pictures, summary and report from the results that are there
"""


def parser() -> Parser:
    made = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES, speaks=is_first_of_host)
    _add_grid(made.add_argument_group("what to measure"))
    _add_training(made.add_argument_group("training"))
    _add_run(made.add_argument_group("run and output"))
    return made


def _add_grid(group: argparse._ArgumentGroup) -> None:
    modes = ", ".join(MODES)
    group.add_argument(
        "--modes", nargs="+", choices=MODES, metavar="MODE",
        help=f"what is measured: any of {modes} (default: all); ratios need no_dp. Without a GPU "
        "flash modes run as their reference implementations, and results say so",
    )  # fmt: skip
    group.add_argument(
        "--seq-lengths", nargs="+", type=int, metavar="T",
        help=f"tokens a sample: every mode is measured at each (default: "
        f"{' '.join(map(str, LENGTHS))})",
    )  # fmt: skip
    group.add_argument(
        "--mode", choices=MODES, metavar="MODE",
        help="measure one cell only, of this mode; with --seq-length (default: the whole grid)",
    )  # fmt: skip
    group.add_argument(
        "--seq-length", type=int, metavar="T",
        help="one cell: tokens a sample; with --mode (default: the whole grid)",
    )  # fmt: skip
    group.add_argument(
        "--model-name", default="llama-3.1-8b", metavar="NAME",
        help=f"a built-in shape with random weights ({', '.join(SHAPES)}), or a Hugging Face name "
        f"or folder with its weights; gated ones need {TOKEN} in the environment "
        "(default: llama-3.1-8b)",
    )  # fmt: skip
    group.add_argument(
        "--num-iter", type=int, default=10, metavar="N",
        help="timed steps a cell and round: more of them, a surer median (default: 10)",
    )  # fmt: skip
    group.add_argument(
        "--warmup-iter", type=int, default=3, metavar="N",
        help="steps before them, which are not timed: first ones are slower (default: 3)",
    )  # fmt: skip
    group.add_argument(
        "--rounds", type=int, metavar="N",
        help="times that the whole list of modes is measured, in turn (default: 1): what drifts "
        "meanwhile then cancels in ratios, and their intervals mean something",
    )  # fmt: skip


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size", type=int, default=1, metavar="B",
        help="samples a rank and step: more of them take more memory, and share what a step costs "
        "whatever its batch (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--clipping", choices=("flat", "per_layer"), default="flat",
        help="one norm and threshold for all parameters, or one a module, whose sums need not wait "
        "for the others (default: flat)",
    )  # fmt: skip
    group.add_argument(
        "--sigma", type=float, default=1.0, metavar="S",
        help="noise multiplier, without unit: noise has S x --max-grad-norm as its standard "
        "deviation; 0 adds none (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-grad-norm", type=float, default=1.0, metavar="C",
        help="largest L2 norm that a sample's gradient keeps; what is longer is scaled down "
        "(default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--learning-rate", type=float, default=1e-5, metavar="LR",
        help="of AdamW, a step; it changes weights, not times (default: 1e-5)",
    )  # fmt: skip
    group.add_argument(
        "--train-embedding", action="store_true",
        help="train the token embedding too, which takes time and memory in proportion to the "
        "vocabulary (default: frozen)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="any whole number from 0: draws weights and batches, never the noise (default: 0)",
    )  # fmt: skip


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-dir", type=Path, metavar="DIR",
        help="receives the results; an existing one resumes "
        "(default: a new results/run_YYYYMMDD_HHMMSS)",
    )  # fmt: skip
    group.add_argument(
        "--output", type=Path, metavar="FILE",
        help="one cell: its result (default: {mode}_seq{T}_result.json in --output-dir, the names "
        "that --redraw reads)",
    )  # fmt: skip
    group.add_argument(
        "--redraw", type=Path, metavar="DIR",
        help="measure nothing: draw the pictures, write summary.txt and report.html, from the "
        "results in DIR, which are named {mode}_seq{T}_result.json (default: after measuring)",
    )  # fmt: skip
    group.add_argument(
        "--dry-run", action="store_true",
        help="say what would be measured, without what is finished in --output-dir, and write "
        "nothing (default: measure)",
    )  # fmt: skip
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where: cuda is all GPUs with NCCL, cpu is gloo; auto: GPUs where there are some "
        "(default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--num-processes", type=int, metavar="N",
        help="ranks, unless torchrun says it (default: one a GPU, two on a CPU)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds without progress after which a cell is given up, as a row (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--enable-profiling", action="store_true",
        help="time each phase and layer of the private modes (DP_CLIPPING_PROFILE=1); rank 0's are "
        "in the results as `profile`, not covered by epsilon, and steps take a little longer "
        "(default: off)",
    )  # fmt: skip
    group.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)  # of a grid's cell


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exit with status 2 and one line for what is wrong before anything is started."""
    made = parser()
    options = made.parse_args(arguments)
    if (options.mode is None) != (options.seq_length is None):
        made.error("--mode and --seq-length: one cell needs both")
    if options.output and options.mode is None:
        made.error("--output is for one cell: give --mode and --seq-length, or --output-dir")
    if options.redraw and options.dry_run:
        made.error("--redraw writes, and --dry-run writes nothing: give one of them")
    for name, default in OF_A_GRID.items():
        if options.mode and getattr(options, name) is not None:
            made.error(f"--mode is for one cell: leave {option(name)} out, or --mode")
        if getattr(options, name) is None:
            setattr(options, name, default)
    try:
        check_numbers(options, POSITIVE, NOT_NEGATIVE)
    except ValueError as error:
        made.error(str(error))
    words = [without_token(w) for w in (sys.argv[1:] if arguments is None else arguments)]
    options.typed = typed_command(["-m", PROGRAM], words)
    options.modes = list(dict.fromkeys(options.modes))
    options.seq_lengths = list(dict.fromkeys(options.seq_lengths))
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    names = set(Settings.__dataclass_fields__) - {"timeout_s", "norm_algorithm"}
    return Settings(**{n: getattr(options, n) for n in names}, timeout_s=options.timeout)


def cell_arguments(cell: Cell, options: argparse.Namespace, output: Path) -> list[str]:
    """The command line of one cell. No secrets: the token stays in the environment."""
    taken = (
        "model_name", "num_iter", "warmup_iter", "batch_size", "clipping", "sigma",
        "max_grad_norm", "learning_rate", "seed", "device", "timeout",
    )  # fmt: skip
    found = ["--mode", cell.mode, "--seq-length", str(cell.seq_length)]
    found += ["--round", str(cell.round), "--output", str(output)]
    for name in taken:
        found += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    flags = ("train_embedding", "enable_profiling")
    return found + ["--" + name.replace("_", "-") for name in flags if getattr(options, name)]


def folder_of(options: argparse.Namespace) -> Path:
    stamp = invocation()[: len("YYYYMMDD_HHMMSS")]
    return options.output_dir or Path("results") / f"run_{stamp}"


def output_of(options: argparse.Namespace, cell: Cell) -> Path:
    return options.output or folder_of(options) / cell.file
