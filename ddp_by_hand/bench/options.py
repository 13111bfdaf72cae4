"""The command line: every option with its unit, its default and its effect."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp import IMPLEMENTATIONS
from ddp_by_hand.bench.sharded import SPLIT
from ddp_by_hand.lm.model import PRESETS
from ddp_by_hand.measure.options import is_seed, not_negative, option, positive, requires
from dp_clipping.arguments.checks import CLIPPINGS, TILE_SIZES
from dp_clipping.clipping.coefficients import CLIPPING_FUNCTIONS
from dp_clipping.distributed.norm_reduce import NORM_REDUCTIONS
from dp_clipping.modes import MODES, REFERENCE_MODE
from dp_clipping.planning.plan import NORM_ALGORITHMS

NOT_PRIVATE = "none"
PRIVATE_MODES = MODES[1:]
FUSED_MODES = tuple(REFERENCE_MODE)
CLIPPING_NAMES = tuple(  # a norm algorithm may stand behind a fused mode's name
    name
    for mode in PRIVATE_MODES
    for name in (mode, *(f"{mode}:{a}" for a in NORM_ALGORITHMS[1:] if mode in FUSED_MODES))
)
DTYPES = ("float32", "mixed", "bfloat16")
PROGRAM = "ddp_by_hand.bench"
EXAMPLES = """\
examples:
  ddp-benchmark
      every implementation, on all GPUs or on two CPU processes
  torchrun --nproc_per_node=4 -m ddp_by_hand.bench --preset 730m --dtype mixed --data synthetic
      four GPUs, 730 M parameters in float32 with bfloat16 arithmetic
  ddp-benchmark --implementations none ddp_bucketed torch_ddp my_ddp.py:MyDDP
      your own variant in the same table
  ddp-benchmark --profile --profile-implementation all
      traces, summaries and the timeline picture in ./profiler_output
  ddp-benchmark --implementations none ddp_bucketed --clipping none bookkeeping
      what private training costs: each of them without and with clipping and noise
  ddp-benchmark --implementations none --show-plan \\
    --clipping none flash_bookkeeping flash_bookkeeping:width flash_bookkeeping:input_length
      what planning each layer's norm by cost gains over one algorithm for all
  ddp-benchmark --implementations none fsdp2 tp --clipping none flash_bookkeeping
      the same overhead where the model is sharded
"""
_from_zero = requires(lambda x: 0 <= x < math.inf, "{}: give a finite number of 0 or more")
_above_zero = requires(lambda x: 0 < x < math.inf, "{}: give a finite number above 0")


def _size(what: str) -> Any:
    return option(None, f"{what} (default: preset's)", metavar="N", check=positive)


# fmt: off
@dataclass(frozen=True)
class Options:
    implementations: tuple[str, ...] = option(tuple(IMPLEMENTATIONS), group="what to compare",
        metavar="NAME", help=(
        f"any of {', '.join(IMPLEMENTATIONS)}, or path/to/file.py:ClassName (default: all "
        "of these); or of those that shard the model: fsdp2 (PyTorch's FSDP2, gathered block by "
        "block), fsdp2_root (all at once), tp (tensor parallel on all ranks), fsdp2_tp (FSDP2 x "
        "two tensor-parallel ranks; 4 ranks or more). Ranks of a tensor axis share a batch. "
        "NAME+OPTION is a row of its own with that option on: ddp_bucketed+find_unused_parameters "
        "agrees in each step on the parameters that some rank used"))
    bucket_size_mb: float | None = option(None, metavar="MIB", check=positive, help=(
        "gradient bytes reduced together, in MiB, for every implementation that batches "
        "(default: each one's own: 200 for ddp_individual_v2, ddp_bucketed, zero1 and zero2, 100 "
        "for ddp_copy_engine and torch_ddp_tuned, 25 for torch_ddp and torch_zero1)"))

    every: int | None = option(None, metavar="H", check=positive, help=(
        "local steps of diloco in a round, which has one exchange; its row has means over H steps. "
        "H divides the number of all steps and is at most that of timed ones (default: the "
        "largest such number)"))

    clipping: tuple[str, ...] = option((NOT_PRIVATE,),
        group="privacy (what --clipping MODE adds to every step)", metavar="MODE", help=(
        f"{NOT_PRIVATE} (or no_dp): ordinary training; or any of {', '.join(PRIVATE_MODES)}: "
        "clip every sample's gradient, sum, add noise (DP-SGD). The flash modes plan by cost how "
        "each linear layer's norm is taken; MODE:width (Gram matrices of tokens) and "
        "MODE:input_length (accumulated over tokens) set it for all. With several, every "
        "implementation is measured with each. Batches are of fixed size, not Poisson samples: "
        "a benchmark, for which no epsilon is stated"))
    noise_multiplier: float | None = option(None, metavar="SIGMA", check=_from_zero, help=(
        "standard deviation of the noise, in units of --max-grad-norm; 0 adds none (default: 1.0)"))
    max_grad_norm: float | None = option(None, metavar="C", check=_above_zero, help=(
        "norm to which each sample's gradient is clipped (Euclidean), above 0 (default: 1.0)"))
    clipping_style: str | None = option(None, choices=CLIPPINGS, help=(
        "flat: one norm over all parameters; per_layer: one for each of the K modules, "
        "clipped to C/sqrt(K) (default: flat)"))
    clipping_function: str | None = option(None, choices=CLIPPING_FUNCTIONS, help=(
        "factor for a gradient of norm n; abadi: min(1, C/n); automatic: C/(n + 0.01) "
        "(default: abadi)"))
    tile_size: int | None = option(None, choices=TILE_SIZES, help=(
        "rows and columns of the tiles that the flash modes' kernels work on, in elements "
        "(default: chosen by the kernels)"))
    memory_budget_mb: float | None = option(None, metavar="MIB", check=_from_zero, help=(
        "what the flash modes' linear layers may keep from backward to their sums, in MiB per "
        "rank; the rest is computed in a second backward (default: what an ordinary step "
        "would hold there; 0 for flash)"))
    norm_reduction: str | None = option(None, choices=NORM_REDUCTIONS, help=(
        f"how {' and '.join(SPLIT)} add up norms over the ranks that split parameters; sync: "
        "one all-reduce that blocks; async: one, beside independent work; layerwise: partial sums "
        "are sent during backward (default: async)"))
    show_plan: bool = option(False, help=(
        "print below the table what the flash modes do with each linear layer: shapes, "
        "algorithm of the norm, predicted time, MiB kept (default: off; with --profile it is in "
        "the summaries, with measured times)"))

    preset: str | None = option(None, group="model (each overrides the preset)",
        choices=tuple(PRESETS), help=(
        "model size (default: laptop on a CPU, small on GPUs)"))
    d_model: int | None = _size("width of the residual stream, in features")
    num_layers: int | None = _size("number of blocks")
    num_heads: int | None = _size("attention heads per block")
    d_ff: int | None = _size("width of the feed-forward layer, in features")
    vocab_size: int | None = _size("size of the vocabulary, in tokens; at least 256 for text")
    context_length: int | None = _size("sequence length, in tokens")
    dtype: str = option("float32", choices=DTYPES, help=(
        "float32; mixed: float32 parameters, bfloat16 arithmetic (autocast); "
        "bfloat16: parameters too, in which sharded ones are gathered and ordinary gradients "
        "reduced; private sums are float32"))
    compile: bool = option(False,
        help="compile each block with torch.compile (default: off); slow to start")

    batch_size: int = option(8, group="run", metavar="N", check=positive,
        help="sequences per rank and step")
    data: str = option("stdlib", metavar="SOURCE", help=(
        "stdlib: the bytes of Python's own sources; synthetic: seeded random tokens; "
        "or a file or folder of text"))
    num_epochs: int = option(2, metavar="N", check=positive,
        help="epochs each implementation trains in a round, warmup included")
    warmup_epochs: int = option(1, metavar="N", check=not_negative, help=(
        "of these, epochs with rising learning rate and clipped gradients (private ones "
        "after noise), which are not timed"))
    steps_per_epoch: int | None = option(None, metavar="N", check=positive,
        help="optimizer steps per epoch (default: 6; 3 in profile mode)")
    rounds: int = option(5, metavar="N", check=positive, help=(
        "how often each implementation is built, trained and timed; rounds are "
        "interleaved so that drift affects all alike"))
    seed: int = option(0, "seed of parameters and batches", metavar="N", check=is_seed)
    device: str = option("auto", choices=("auto", "cpu", "cuda"),
        help="auto: all GPUs with NCCL if there are any, else CPU with gloo")
    num_processes: int | None = option(None, metavar="N", check=positive,
        help="ranks to start when not under torchrun (default: one per GPU, two on a CPU)")
    timeout: float = option(300.0, metavar="SECONDS", check=positive, help=(
        "give up when no rank makes progress for this long, and name the rank that blocks the "
        "others"))

    output_dir: Path | None = option(None, group="output", metavar="FOLDER", help=(
        "receives results.jsonl, comparison.png, memory.png and report.html; an existing one is "
        "resumed (default: results_ddp/ and the time)"))
    dry_run: bool = option(False,
        help=(
        "check the options, print the plan and the predicted memory, start and write nothing "
        "(default: off)"))

    profile: bool = option(False, group="profile mode (instead of the benchmark)",
        help="record traces with the PyTorch profiler (default: benchmark)")
    profile_implementation: str | None = option(None, metavar="NAME",
        help="one implementation, or all on one time axis (default: all of --implementations)")
    enable_profiling: bool = option(False, help=(
        "with a private --clipping also time each phase and layer of a step "
        "(DP_CLIPPING_PROFILE=1), into *_phases.txt (default: off)"))
    profile_output_dir: Path = option(Path("profiler_output"), metavar="FOLDER",
        help="receives traces, summaries and pictures (default: ./profiler_output)")
# fmt: on
