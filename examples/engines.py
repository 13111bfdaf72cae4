"""What the `opacus_*.py` examples share: which engine, and the options of a small run.

They are the code paths of Opacus's tutorials in ghost mode, on models and data that need no
download. Nothing in them depends on the engine but `engine_classes` and `data_parallel`: to move a
program from Opacus, change its imports.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from measure.command_line import Parser

ENGINES = ("dp_clipping", "opacus")


def engine_classes(name: str) -> tuple[Any, Any]:
    """Returns `PrivacyEngine` and `BatchMemoryManager` of the package that `--engine` names."""
    if name == "opacus":
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager
    else:
        from dp_clipping import BatchMemoryManager, PrivacyEngine
    return PrivacyEngine, BatchMemoryManager


def data_parallel(name: str, network: nn.Module) -> nn.Module:
    """Returns the network in the wrapper that adds up this engine's clipped sums over ranks."""
    if name == "opacus":
        from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

        return DifferentiallyPrivateDistributedDataParallel(network)
    from ddp import wrap

    return wrap("ddp_bucketed", network)


def parser(program: str, description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Returns the options that all examples have, with their defaults."""
    values = {
        "epochs": 3, "batch_size": 64, "max_physical_batch_size": 32, "learning_rate": 1e-2,
    } | defaults  # fmt: skip
    made = Parser(prog=program, description=description)
    made.add_argument(
        "--engine", choices=ENGINES, default="dp_clipping",
        help="which package makes the training private (default: dp_clipping)",
    )  # fmt: skip
    for name, kind, default, what in (
        ("epochs", int, values["epochs"], "how often a sample is drawn, on average"),
        ("batch-size", int, values["batch_size"], "samples per step, on average"),
        ("max-physical-batch-size", int, values["max_physical_batch_size"], "samples at a time"),
        ("learning-rate", float, values["learning_rate"], "of Adam"),
        ("epsilon", float, 8.0, "what the run may spend"),
        ("delta", float, 1e-4, "probability that the bound fails; below 1/samples"),
        ("max-grad-norm", float, 1.0, "norm that a sample's gradient is clipped to"),
    ):
        made.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{what} ({default})"
        )
    made.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="of data and initial parameters, not of noise and draws (0)",
    )  # fmt: skip
    return made


def checked(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options; a wrong one ends the program with status 2 and one line."""
    options = made.parse_args(arguments)
    for name, value in vars(options).items():
        if isinstance(value, int | float) and value <= 0 and name != "seed":
            made.error(f"--{name.replace('_', '-')} is {value}: give a number above 0")
    return options


def run(made: argparse.ArgumentParser, train: Any, arguments: Sequence[str] | None = None) -> int:
    """Parses, checks and trains; returns the exit status."""
    train(checked(made, arguments))
    return 0
