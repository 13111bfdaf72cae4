"""The command line of `examples.private_text`: every option with its unit, default and effect."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dp_clipping import MODES
from lm.runtime import is_first_of_host
from measure.command_line import Parser

PRIVATE_MODES = tuple(mode for mode in MODES if mode != "no_dp")
# May differ between a run and its resume: they change where and when, not what is computed.
RESUMABLE = ("output_dir", "device", "max_physical_batch_size", "report_every", "checkpoint_every")
EXAMPLES = """\
examples:
  python -m examples.private_text
      Python's own sources, epsilon 8, some minutes on two cores
  python -m examples.private_text --data letters/ --epsilon 2 --epochs 4
      your own text, four passes in expectation, more noise
  torchrun --nproc_per_node=4 -m examples.private_text --batch-size 4096
      four ranks; --batch-size counts the windows of all of them
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Exit with status 2 and one line for what argparse itself can tell is wrong."""
    parser = Parser(
        prog="private_text",
        description="Train a small transformer on text under a stated (epsilon, delta).",
        epilog=EXAMPLES,
        speaks=is_first_of_host,
    )
    _add_privacy(parser.add_argument_group("privacy"))
    _add_data(parser.add_argument_group("data and model"))
    _add_run(parser.add_argument_group("run"))
    return parser.parse_args(arguments)


def _add_privacy(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--epsilon", type=float, default=8.0, metavar="E",
        help="what the whole run may spend; the noise follows from it (default: 8)",
    )  # fmt: skip
    group.add_argument(
        "--delta", type=float, metavar="D",
        help="probability that the bound fails; below 1/windows (default: windows to the power "
        "-1.1, that is 2.7e-06 for the default data)",
    )  # fmt: skip
    group.add_argument(
        "--max-grad-norm", type=float, default=1.0, metavar="C",
        help="norm that a window's gradient is clipped to; the noise grows with it (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=int, default=512, metavar="N",
        help="windows a step on all ranks together, on average: draws vary (default: 512)",
    )  # fmt: skip
    group.add_argument(
        "--epochs", type=int, default=1, metavar="N",
        help="how often a window is drawn, on average; more steps need more noise (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--mode", choices=PRIVATE_MODES, default="flash_bookkeeping", metavar="MODE",
        help=f"how norms and sums are computed, one of {', '.join(PRIVATE_MODES)}; the result is "
        "the same to rounding (default: flash_bookkeeping)",
    )  # fmt: skip


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", default="stdlib", metavar="SOURCE",
        help="stdlib: the bytes of Python's own sources; or a file or folder of text "
        "(default: stdlib)",
    )  # fmt: skip
    group.add_argument(
        "--context-length", type=int, default=64, metavar="T",
        help="bytes a window predicts, each from those before it; a window is one byte longer "
        "(default: 64)",
    )  # fmt: skip
    for name, default, what in (
        ("d-model", 64, "width of the residual stream, in features"),
        ("num-layers", 2, "number of blocks"),
        ("num-heads", 4, "attention heads a block"),
        ("d-ff", 128, "width of the feed-forward layer, in features"),
    ):
        group.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--learning-rate", type=float, default=1e-2, metavar="R",
        help="of Adam, after a warm-up of 20 steps (default: 0.01)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="of the initial parameters, 0 or more; noise and draws never depend on it "
        "(default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--max-physical-batch-size", type=int, default=64, metavar="N",
        help="windows a rank computes at a time; memory, not the result (default: 64)",
    )  # fmt: skip
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--output-dir", type=Path, default=Path("results_private_text"), metavar="FOLDER",
        help="receives model, picture, log and checkpoint; a run that it holds is gone on with "
        "(default: results_private_text)",
    )  # fmt: skip
    group.add_argument(
        "--report-every", type=int, default=10, metavar="N",
        help="steps between two lines of progress (default: 10)",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-every", type=int, default=20, metavar="N",
        help="steps between two checkpoints; a kill costs at most so many (default: 20)",
    )  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Raises ValueError naming the option whose number is out of range."""
    for name in ("epsilon", "max_grad_norm", "learning_rate"):
        if not 0 < getattr(options, name) < math.inf:
            _refuse(options, name, "give a finite number above 0")
    if options.delta is not None and not 0 < options.delta < 1:
        _refuse(options, "delta", "give a number between 0 and 1")
    for name in (
        "batch_size", "epochs", "context_length", "d_model", "num_layers", "num_heads", "d_ff",
        "max_physical_batch_size", "report_every", "checkpoint_every",
    ):  # fmt: skip
        if getattr(options, name) < 1:
            _refuse(options, name, "give 1 or more")
    if options.seed < 0:
        _refuse(options, "seed", "give 0 or more")
    if options.output_dir.exists() and not options.output_dir.is_dir():
        _refuse(options, "output_dir", "it is a file: give a folder")


def _refuse(options: argparse.Namespace, name: str, instead: str) -> NoReturn:
    raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}: {instead}")
