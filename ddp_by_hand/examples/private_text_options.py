"""The command line of `examples.private_text`: every option with its unit, default and effect."""

import math
from dataclasses import dataclass
from pathlib import Path

from ddp_by_hand.measure.options import is_seed, option, requires
from dp_clipping import MODES

PROGRAM = "ddp_by_hand.examples.private_text"
DOES = "Train a small transformer on text under a stated (epsilon, delta)."
PRIVATE_MODES = tuple(mode for mode in MODES if mode != "no_dp")
# May differ between a run and its resume: they change where and when, not what is computed.
RESUMABLE = ("output_dir", "device", "max_physical_batch_size", "report_every", "checkpoint_every")
EXAMPLES = """\
examples:
  python -m ddp_by_hand.examples.private_text
      Python's own sources, epsilon 8, about 90 seconds on two cores
  python -m ddp_by_hand.examples.private_text --data letters/ --epsilon 2 --epochs 4
      your own text, four passes in expectation, more noise
  torchrun --nproc_per_node=4 -m ddp_by_hand.examples.private_text --batch-size 4096
      four ranks; --batch-size counts the sequences of all of them
"""


_finite = requires(lambda x: 0 < x < math.inf, "is {}: give a finite number above 0")
_share = requires(lambda x: 0 < x < 1, "is {}: give a number between 0 and 1")
_count = requires(lambda x: x >= 1, "is {}: give 1 or more")
_folder = requires(lambda x: x.is_dir() or not x.exists(), "is {}: it is a file: give a folder")


# fmt: off
@dataclass(frozen=True)
class Options:
    epsilon: float = option(8.0, group="privacy", metavar="E", check=_finite,
        help="what the whole run may spend; the noise follows from it")
    delta: float | None = option(None, metavar="D", check=_share, help=(
        "probability that the bound fails; below 1/sequences (default: sequences to the power "
        "-1.1, that is 2.7e-06 for the default data)"))
    max_grad_norm: float = option(1.0, metavar="C", check=_finite,
        help="norm that a sequence's gradient is clipped to; the noise grows with it")
    batch_size: int = option(512, metavar="N", check=_count,
        help="sequences per step on all ranks together, on average: batches vary in size")
    epochs: int = option(1, metavar="N", check=_count,
        help="how often a sequence is in a batch, on average; more steps need more noise")
    mode: str = option("flash_bookkeeping", choices=PRIVATE_MODES, metavar="MODE", help=(
        f"how norms and sums are computed, one of {', '.join(PRIVATE_MODES)}; the result is "
        "the same to rounding"))

    data: str = option("stdlib", group="data and model", metavar="SOURCE",
        help="stdlib: the bytes of Python's own sources; or a file or folder of text")
    context_length: int = option(64, metavar="T", check=_count,
        help="bytes a sequence predicts, each from those before it; a sequence is one byte longer")
    d_model: int = option(64, metavar="N", check=_count,
        help="width of the residual stream, in features")
    num_layers: int = option(2, "number of blocks", metavar="N", check=_count)
    num_heads: int = option(4, "attention heads per block", metavar="N", check=_count)
    d_ff: int = option(128, metavar="N", check=_count,
        help="width of the feed-forward layer, in features")

    learning_rate: float = option(1e-2, group="run", metavar="R", check=_finite,
        help="learning rate of Adam, after a warm-up of 20 steps")
    seed: int = option(0, metavar="N", check=is_seed,
        help="seed of the initial parameters, 0 or more; never of noise and batches")
    max_physical_batch_size: int = option(64, metavar="N", check=_count,
        help="sequences that a rank processes at a time; affects memory, not the result")
    device: str = option("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    output_dir: Path = option(Path("results_private_text"), metavar="FOLDER", check=_folder,
        help="receives model, picture, log and checkpoint; a run that it holds is continued")
    report_every: int = option(10, "steps between two lines of progress", metavar="N", check=_count)
    checkpoint_every: int = option(20, metavar="N", check=_count,
        help="steps between two checkpoints; a kill costs at most so many")
# fmt: on
