"""The command line: every option with its unit, its default and its effect."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.sharded import SPLIT
from ddp import IMPLEMENTATIONS
from lm.model import PRESETS
from lm.runtime import is_first_of_host
from measure.command_line import Parser

NOT_PRIVATE = "none"
# As dp_clipping has them: importing it imports Opacus, two seconds that an ordinary run can spare.
CLIPPING_MODES = ("per_sample", "ghost", "flash", "bookkeeping", "flash_bookkeeping")
FUSED_MODES = ("flash", "flash_bookkeeping")
NORM_ALGORITHMS = ("input_length", "width")  # behind a fused mode's name; without: "auto"
CLIPPING_NAMES = tuple(
    name
    for mode in CLIPPING_MODES
    for name in (mode, *(f"{mode}:{a}" for a in NORM_ALGORITHMS if mode in FUSED_MODES))
)
TILE_SIZES = (16, 32, 64, 128, 256)
CLIPPING_STYLES = ("flat", "per_layer")
CLIPPING_FUNCTIONS = ("abadi", "automatic")
NORM_REDUCTIONS = ("sync", "async", "layerwise")
DTYPES = ("float32", "mixed", "bfloat16")
EXAMPLES = """\
examples:
  python benchmark_ddp.py
      every implementation, on all GPUs or on two CPU processes
  torchrun --nproc_per_node=4 benchmark_ddp.py --preset 730m --dtype mixed --data synthetic
      four GPUs, 730 M parameters in float32 with bfloat16 arithmetic
  python benchmark_ddp.py --implementations none ddp_bucketed torch_ddp my_ddp.py:MyDDP
      your own variant in the same table
  python benchmark_ddp.py --profile --profile-implementation all
      traces, summaries and the timeline picture in ./profiler_output
  python benchmark_ddp.py --implementations none ddp_bucketed --clipping none bookkeeping
      what private training costs: each of them without and with clipping and noise
  python benchmark_ddp.py --implementations none --show-plan \\
    --clipping none flash_bookkeeping flash_bookkeeping:width flash_bookkeeping:input_length
      what planning each layer's norm by cost gains over one algorithm for all
  python benchmark_ddp.py --implementations none fsdp2 tp --clipping none flash_bookkeeping
      the same price where the model is sharded
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Exit with status 2 and one line for what argparse itself can tell is wrong."""
    parser = Parser(
        prog="benchmark_ddp.py",
        description="Prove, time and profile data-parallel implementations beside PyTorch's own.",
        epilog=EXAMPLES,
        speaks=is_first_of_host,
    )
    _add_what(parser.add_argument_group("what to compare"))
    _add_privacy(parser.add_argument_group("privacy (what --clipping MODE adds to every step)"))
    _add_model(parser.add_argument_group("model (each overrides the preset)"))
    _add_run(parser.add_argument_group("run"))
    _add_output(parser.add_argument_group("output"))
    _add_profile(parser.add_argument_group("profile mode (instead of the benchmark)"))
    return parser.parse_args(arguments)


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--implementations", nargs="+", metavar="NAME", default=list(IMPLEMENTATIONS),
        help=f"any of {', '.join(IMPLEMENTATIONS)}, or path/to/file.py:ClassName (default: all "
        "of these); or of those that shard the model: fsdp2 (PyTorch's FSDP2, gathered block by "
        "block), fsdp2_root (all at once), tp (tensor parallel on all ranks), fsdp2_tp (FSDP2 x "
        "two tensor-parallel ranks; 4 ranks or more). Ranks of a tensor axis share a batch",
    )  # fmt: skip
    group.add_argument(
        "--bucket-size-mb", type=float, metavar="MIB",
        help="gradient bytes reduced together, in MiB, for every implementation that batches "
        "(default: each one's own: 200 for ddp_individual_v2 and ddp_bucketed, 100 for "
        "ddp_copy_engine and torch_ddp_tuned, 25 for torch_ddp)",
    )  # fmt: skip


def _add_privacy(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--clipping", nargs="+", metavar="MODE", default=[NOT_PRIVATE],
        help=f"{NOT_PRIVATE} (or no_dp): ordinary training; or any of {', '.join(CLIPPING_MODES)}: "
        "clip every sample's gradient, sum, add noise (DP-SGD). The flash modes plan by cost how "
        "each linear layer's norm is taken; MODE:width (Gram matrices of tokens) and "
        "MODE:input_length (accumulated over tokens) set it for all. With several, every "
        "implementation is measured with each. Batches are of fixed size, not Poisson samples: "
        "a benchmark, for which no epsilon is stated (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--noise-multiplier", type=float, metavar="SIGMA",
        help="standard deviation of the noise, in units of --max-grad-norm; 0 adds none "
        "(default: 1.0)",
    )  # fmt: skip
    group.add_argument(
        "--max-grad-norm", type=float, metavar="C",
        help="what the gradient of a sample is clipped to, its Euclidean norm, above 0 "
        "(default: 1.0)",
    )  # fmt: skip
    group.add_argument(
        "--clipping-style", choices=CLIPPING_STYLES,
        help="flat: one norm over all parameters; per_layer: one for each of the K modules, "
        "clipped to C/sqrt(K) (default: flat)",
    )  # fmt: skip
    group.add_argument(
        "--clipping-function", choices=CLIPPING_FUNCTIONS,
        help="factor for a gradient of norm n; abadi: min(1, C/n); automatic: C/(n + 0.01) "
        "(default: abadi)",
    )  # fmt: skip
    group.add_argument(
        "--tile-size", type=int, choices=TILE_SIZES,
        help="rows and columns of the tiles that the flash modes' kernels work on, in elements "
        "(default: chosen by the kernels)",
    )  # fmt: skip
    group.add_argument(
        "--memory-budget-mb", type=float, metavar="MIB",
        help="what the flash modes' linear layers may keep from backward to their sums, in MiB a "
        "rank; what does not fit is formed in a second backward (default: what an ordinary step "
        "would hold there; 0 for flash)",
    )  # fmt: skip
    group.add_argument(
        "--norm-reduction", choices=NORM_REDUCTIONS,
        help=f"how {' and '.join(SPLIT)} add up norms over the ranks that split parameters; sync: "
        "one all-reduce that blocks; async: one, beside independent work; layerwise: partial sums "
        "leave during backward (default: async)",
    )  # fmt: skip
    group.add_argument(
        "--show-plan", action="store_true",
        help="print below the table what the flash modes do with each linear layer: shapes, "
        "algorithm of the norm, predicted time, MiB kept (default: off; with --profile it is in "
        "the summaries, with measured times)",
    )  # fmt: skip


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset", choices=list(PRESETS),
        help="model size (default: laptop on a CPU, small on GPUs)",
    )  # fmt: skip
    for name, what in {
        "d-model": "width of the residual stream, in features",
        "num-layers": "number of blocks",
        "num-heads": "attention heads a block",
        "d-ff": "width of the feed-forward layer, in features",
        "vocab-size": "number of different tokens; at least 256 for text",
        "context-length": "sequence length, in tokens",
    }.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default: preset's)")
    group.add_argument(
        "--dtype", choices=DTYPES, default="float32",
        help="float32; mixed: float32 parameters, bfloat16 arithmetic (autocast); "
        "bfloat16: parameters too, in which sharded ones are gathered and ordinary gradients "
        "reduced; private sums are float32 (default: float32)",
    )  # fmt: skip
    group.add_argument(
        "--compile", action="store_true",
        help="compile each block with torch.compile (default: off); slow to start",
    )  # fmt: skip


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size", type=int, default=8, metavar="N",
        help="sequences a rank and step (default: 8)",
    )  # fmt: skip
    group.add_argument(
        "--data", default="stdlib", metavar="SOURCE",
        help="stdlib: the bytes of Python's own sources; synthetic: seeded random tokens; "
        "or a file or folder of text (default: stdlib)",
    )  # fmt: skip
    group.add_argument(
        "--num-epochs", type=int, default=2, metavar="N",
        help="epochs each implementation trains in a round, warmup included (default: 2)",
    )  # fmt: skip
    group.add_argument(
        "--warmup-epochs", type=int, default=1, metavar="N",
        help="of these, epochs with rising learning rate and clipped gradients (private ones "
        "after noise), which are not timed (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--steps-per-epoch", type=int, metavar="N",
        help="optimizer steps an epoch (default: 6; 3 in profile mode)",
    )  # fmt: skip
    group.add_argument(
        "--rounds", type=int, default=5, metavar="N",
        help="how often each implementation is built, trained and timed; rounds are "
        "interleaved so that drift hits all alike (default: 5)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="of parameters and batches, 0 or more (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: all GPUs with NCCL if there are any, else CPU with gloo (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--num-processes", type=int, metavar="N",
        help="ranks to start when not under torchrun (default: one a GPU, two on a CPU)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS",
        help="give up when no rank makes progress for so long, and name the one that the others "
        "wait for (default: 300)",
    )  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-dir", type=Path, metavar="FOLDER",
        help="receives results.jsonl, comparison.png and report.html; an existing one is resumed "
        "(default: results_ddp/ and the time)",
    )  # fmt: skip
    group.add_argument(
        "--dry-run", action="store_true",
        help="check the options, print the plan, start and write nothing (default: off)",
    )  # fmt: skip


def _add_profile(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--profile", action="store_true",
        help="record traces with the PyTorch profiler (default: benchmark)",
    )  # fmt: skip
    group.add_argument(
        "--profile-implementation", metavar="NAME",
        help="one implementation, or all on one time axis (default: all of --implementations)",
    )  # fmt: skip
    group.add_argument(
        "--enable-profiling", action="store_true",
        help="with a private --clipping also time each phase and layer of a step "
        "(DP_CLIPPING_PROFILE=1), into *_phases.txt (default: off)",
    )  # fmt: skip
    group.add_argument(
        "--profile-output-dir", type=Path, default=Path("profiler_output"), metavar="FOLDER",
        help="receives traces, summaries and pictures (default: ./profiler_output)",
    )  # fmt: skip
