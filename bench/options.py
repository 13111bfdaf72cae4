"""The command line, checked before any worker starts, and the settings that it becomes."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from ddp import IMPLEMENTATIONS, implementation
from lm.data import Batches, open_data
from lm.model import PRESETS, ModelConfig

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
"""


@dataclass(frozen=True)
class Settings:
    """What one call of the benchmark does; sizes are per rank, sequences in tokens."""

    implementations: tuple[str, ...]
    model: ModelConfig
    batch_size: int
    bucket_size_mb: float | None
    num_epochs: int
    warmup_epochs: int
    steps_per_epoch: int
    rounds: int
    seed: int
    dtype: str
    compile: bool
    data: str
    timeout_s: float
    output_dir: Path

    @property
    def warmup_steps(self) -> int:
        return self.warmup_epochs * self.steps_per_epoch

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch

    def identity(self) -> dict:
        """What makes two measurements comparable: everything but names, order and places."""
        skipped = {"implementations", "output_dir", "rounds", "timeout_s"}
        return {k: v for k, v in asdict(self).items() if k not in skipped}


class Parser(argparse.ArgumentParser):
    """argparse, with a wrong option answered by one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Exit with status 2 and one line for what argparse itself can tell is wrong."""
    parser = Parser(
        prog="benchmark_ddp.py",
        description="Prove, time and profile data-parallel implementations beside PyTorch's own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser.add_argument_group("what to compare"))
    _add_model(parser.add_argument_group("model (each overrides the preset)"))
    _add_run(parser.add_argument_group("run"))
    _add_output(parser.add_argument_group("output"))
    _add_profile(parser.add_argument_group("profile mode (instead of the benchmark)"))
    return parser.parse_args(arguments)


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--implementations", nargs="+", metavar="NAME", default=list(IMPLEMENTATIONS),
        help=f"any of {', '.join(IMPLEMENTATIONS)}, or path/to/file.py:ClassName (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--bucket-size-mb", type=float, metavar="MIB",
        help="gradient bytes reduced together, in MiB, for every implementation that batches "
        "(default: each one's own, 100 for the hand-built ones, 25 for torch_ddp)",
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
        "bfloat16: parameters too (default: float32)",
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
        help="of these, epochs with rising learning rate and clipped gradients, which are not "
        "timed (default: 1)",
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
        help="receives results.jsonl and comparison.png; an existing one is resumed "
        "(default: results_ddp/ and the time)",
    )  # fmt: skip
    group.add_argument(
        "--dry-run", action="store_true", help="check the options, print the plan, start nothing"
    )


def _add_profile(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--profile", action="store_true",
        help="record traces with the PyTorch profiler (default: benchmark)",
    )  # fmt: skip
    group.add_argument(
        "--profile-implementation", metavar="NAME", default="all",
        help="one implementation, or all on one time axis (default: all of --implementations)",
    )  # fmt: skip
    group.add_argument(
        "--profile-output-dir", type=Path, default=Path("profiler_output"), metavar="FOLDER",
        help="receives traces, summaries and pictures (default: ./profiler_output)",
    )  # fmt: skip


def settings_from(options: argparse.Namespace, device_type: str, default_folder: Path) -> Settings:
    """Check what the options mean together.

    Raises:
        ValueError: one line that names the option, what is wrong, and what to do.
    """
    _require_positive(options)
    names = [options.profile_implementation] if options.profile else options.implementations
    if options.profile and options.profile_implementation == "all":
        names = options.implementations
    for name in names:
        implementation(name)
    if len(set(names)) < len(names):
        raise ValueError("--implementations: a name appears twice, give each once")
    if options.warmup_epochs > options.num_epochs:
        raise ValueError(
            f"--warmup-epochs {options.warmup_epochs} exceeds --num-epochs {options.num_epochs}"
        )
    if options.warmup_epochs == options.num_epochs and not options.profile:
        raise ValueError(
            f"--warmup-epochs {options.warmup_epochs} leaves no epoch to time, "
            "give a larger --num-epochs"
        )
    settings = Settings(
        implementations=tuple(names),
        model=_model(options, device_type),
        batch_size=options.batch_size,
        bucket_size_mb=options.bucket_size_mb,
        num_epochs=options.num_epochs,
        warmup_epochs=options.warmup_epochs,
        steps_per_epoch=options.steps_per_epoch or (3 if options.profile else 6),
        rounds=options.rounds,
        seed=options.seed,
        dtype=options.dtype,
        compile=options.compile,
        data=_data_source(options.data),
        timeout_s=options.timeout,
        output_dir=options.output_dir or default_folder,
    )
    batches_for(settings, rank=0, world_size=1)  # unreadable, empty or too short a text
    return settings


def batches_for(settings: Settings, rank: int, world_size: int) -> Batches:
    return Batches(
        open_data(settings.data, settings.model.vocab_size),
        batch_size=settings.batch_size,
        context_length=settings.model.context_length,
        rank=rank,
        world_size=world_size,
        seed=settings.seed,
    )


def _model(options: argparse.Namespace, device_type: str) -> ModelConfig:
    preset = options.preset or ("small" if device_type == "cuda" else "laptop")
    names = {field.name for field in fields(ModelConfig)}
    given = {k: v for k, v in vars(options).items() if k in names and v is not None}
    return replace(PRESETS[preset], **given)


def _data_source(source: str) -> str:
    """A path is made absolute: it names the same text when a resumed run starts elsewhere."""
    return source if source in ("stdlib", "synthetic") else str(Path(source).absolute())


def _require_positive(options: argparse.Namespace) -> None:
    sizes = [
        "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length", "batch_size",
        "num_epochs", "steps_per_epoch", "rounds", "num_processes", "bucket_size_mb", "timeout",
    ]  # fmt: skip
    for name in sizes:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
    for name in ("warmup_epochs", "seed"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: give 0 or more")
