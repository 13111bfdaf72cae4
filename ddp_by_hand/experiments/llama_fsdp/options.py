"""The command line of `experiments.llama_fsdp`: every option with its unit, default and effect."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_by_hand.experiments.llama_fsdp.network import SHAPES, TOKEN
from ddp_by_hand.experiments.llama_fsdp.results import MODES, GridCell
from ddp_by_hand.lm.runtime import invocation
from ddp_by_hand.measure.options import flag, is_seed, not_negative, option, positive
from dp_clipping.arguments.checks import CLIPPINGS

PROGRAM = "ddp_by_hand.experiments.llama_fsdp"
LENGTHS = (1024, 2048, 4096)
OF_A_GRID = ("modes", "seq_lengths", "rounds")
DESCRIPTION = """\
Measures private training of a Llama under FSDP2, mode by mode and length by length.

Each cell, a mode at a sequence length, is measured in processes of its own; one that runs out of
memory or fails is a row like the others. The same command with the same --output-dir measures the
rest. The results folder receives

    {mode}_seq{T}_result.json        times of every step, phases, memory, environment
    visualizations/*.png             memory, time, both against each other, ratios to no_dp
    summary.txt                      the table of all that
    report.html                      tables, pictures and where they come from, in one file
    results.jsonl                    what a rerun resumes from
"""
EXAMPLES = """\
examples:
  python -m ddp_by_hand.experiments.llama_fsdp
      the 8B shape, all modes at 1024, 2048 and 4096 tokens, on all GPUs of this machine
  python -m ddp_by_hand.experiments.llama_fsdp --model-name tiny --seq-lengths 32 64 --num-iter 3
      a rehearsal in a minute or two, on two CPU processes
  python -m ddp_by_hand.experiments.llama_fsdp --rounds 5 --output-dir results/mine
      five interleaved rounds, whose spread says how far to trust a ratio; again: resumes
  python -m ddp_by_hand.experiments.llama_fsdp --mode flash_fsdp --seq-length 2048 --output one.json
      one cell
  torchrun --nproc_per_node=8 -m ddp_by_hand.experiments.llama_fsdp --modes no_dp ghost_fsdp
      the same under torchrun, also over several nodes
  python -m ddp_by_hand.experiments.llama_fsdp --redraw results/mine
      pictures, summary and report from the results that are there
"""


# fmt: off
@dataclass(frozen=True)
class Options:
    modes: tuple[str, ...] | None = option(None, group="what to measure", choices=tuple(MODES),
        metavar="MODE", help=(
        f"what is measured: any of {', '.join(MODES)} (default: all); ratios need no_dp. "
        "Without a GPU flash modes run as their reference implementations, and results say so"))
    seq_lengths: tuple[int, ...] | None = option(None, metavar="T", check=positive, help=(
        f"tokens per sample: every mode is measured at each (default: "
        f"{' '.join(map(str, LENGTHS))})"))
    mode: str | None = option(None, choices=tuple(MODES), metavar="MODE",
        help="measure one cell only, of this mode; with --seq-length (default: the whole grid)")
    seq_length: int | None = option(None, metavar="T", check=positive,
        help="one cell: tokens per sample; with --mode (default: the whole grid)")
    model_name: str = option("llama-3.1-8b", metavar="NAME", help=(
        f"a built-in shape with random weights ({', '.join(SHAPES)}), or a Hugging Face name "
        f"or folder with its weights; gated ones need {TOKEN} in the environment"))
    num_iter: int = option(10, metavar="N", check=positive,
        help="timed steps per cell and round; more give a steadier median")
    warmup_iter: int = option(3, metavar="N", check=not_negative,
        help="untimed steps before them; first steps are slower")
    rounds: int | None = option(None, metavar="N", check=positive, help=(
        "times that the whole list of modes is measured, in turn (default: 1); drift then cancels "
        "in ratios, and their intervals cover it"))

    batch_size: int = option(1, group="training", metavar="B", check=positive, help=(
        "samples per rank and step: more of them take more memory, and share what a step costs "
        "whatever its batch"))
    clipping: str = option("flat", choices=CLIPPINGS, help=(
        "one norm and threshold for all parameters, or one per module, whose sums need not wait "
        "for the others"))
    sigma: float = option(1.0, metavar="S", check=not_negative, help=(
        "noise multiplier, without unit: noise has S x --max-grad-norm as its standard "
        "deviation; 0 adds none"))
    max_grad_norm: float = option(1.0, metavar="C", check=positive,
        help="L2 norm to which each sample's gradient is clipped")
    learning_rate: float = option(1e-5, metavar="LR", check=positive,
        help="learning rate of AdamW; it affects weights, not times (default: 1e-5)")
    train_embedding: bool = option(False, help=(
        "train the token embedding too, which takes time and memory in proportion to the "
        "vocabulary (default: frozen)"))
    seed: int = option(0, metavar="N", check=is_seed,
        help="any whole number from 0: draws weights and batches, never the noise")

    output_dir: Path | None = option(None, group="run and output", metavar="DIR", help=(
        "receives the results; an existing one resumes "
        "(default: a new results/run_YYYYMMDD_HHMMSS)"))
    output: Path | None = option(None, metavar="FILE", help=(
        "one cell: its result (default: {mode}_seq{T}_result.json in --output-dir, the names "
        "that --redraw reads)"))
    redraw: Path | None = option(None, metavar="DIR", help=(
        "measure nothing: draw the pictures, write summary.txt and report.html, from the "
        "results in DIR, which are named {mode}_seq{T}_result.json (default: after measuring)"))
    dry_run: bool = option(False, help=(
        "say what would be measured, without what is finished in --output-dir, and write "
        "nothing (default: measure)"))
    device: str = option("auto", choices=("auto", "cpu", "cuda"),
        help="where: cuda is all GPUs with NCCL, cpu is gloo; auto: GPUs where there are some")
    num_processes: int | None = option(None, metavar="N", check=positive,
        help="number of ranks, unless torchrun sets it (default: one per GPU, two on a CPU)")
    timeout: float = option(600.0, metavar="S", check=positive,
        help="seconds without progress after which a cell is given up, as a row")
    enable_profiling: bool = option(False, help=(
        "time each phase and layer of the private modes (DP_CLIPPING_PROFILE=1); rank 0's are "
        "in the results as `profile`, not covered by epsilon, and steps take a little longer "
        "(default: off)"))
    round: int = option(0, SUPPRESS, check=not_negative)
# fmt: on

    def __post_init__(self) -> None:
        if (self.mode is None) != (self.seq_length is None):
            raise ValueError("--mode and --seq-length: one cell needs both")
        if self.output and self.mode is None:
            raise ValueError(
                "--output is for one cell: give --mode and --seq-length, or --output-dir"
            )
        if self.redraw and self.dry_run:
            raise ValueError("--redraw writes, and --dry-run writes nothing: give one of them")
        for name in OF_A_GRID:
            if self.mode and getattr(self, name) is not None:
                raise ValueError(f"--mode is for one cell: leave {flag(name)} out, or --mode")

    def for_cell(self, cell: GridCell, output: Path) -> Options:
        """Returns the options of one cell's command. The access token stays in the environment."""
        none = dict.fromkeys((*OF_A_GRID, "output_dir", "num_processes"))
        one = {"mode": cell.mode, "seq_length": cell.seq_length, "round": cell.round}
        return replace(self, output=output, **one, **none)


def new_folder(name: str) -> Path:
    """Returns the folder of this call's results: the name, and when the call began."""
    return Path("results") / f"{name}_{invocation()[: len('YYYYMMDD_HHMMSS')]}"
