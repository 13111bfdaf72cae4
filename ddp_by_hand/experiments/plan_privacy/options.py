"""The command line of `experiments.plan_privacy`, and the throughput that it names."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddp_by_hand.measure import OK
from ddp_by_hand.measure.options import is_writable, option, positive, requires
from ddp_by_hand.measure.results import newest_rows

PROGRAM = "ddp_by_hand.experiments.plan_privacy"
PUBLISHED = "published"
CALL = f"python -m {PROGRAM} --epsilon 2 --examples 1e8 --compute 1e21"
CALIBRATE = f"python -m {PROGRAM} --calibrate my_runs --epsilon 2 --compute 1.2e12"
MEASURED = "--tokens-per-second 67800 --measured-parameters 1.24e9"

_share = requires(lambda x: 0 < x < 1, "is {}: give a number between 0 and 1")


def whole(text: str) -> int:
    """Reads a whole number, `1e8` too."""
    value = float(text)
    if not math.isfinite(value) or value != int(value) or value < 2:
        raise ValueError(f"{text} is no whole number of 2 or more")
    return int(value)


class Throughput(NamedTuple):
    """FLOP/s of one GPU in private training, at 6 · M FLOPs per token, and where it is from."""

    flops_per_second: float
    source: str


# fmt: off
@dataclass(frozen=True)
class Options:
    epsilon: float = option(2.0, "what the training may spend", group="budget", metavar="E",
        check=positive)
    delta: float | None = option(None, metavar="D", check=_share, help=(
        "probability that the bound fails (default: examples to the power -1.1)"))
    examples: int | None = option(None, metavar="N", type=whole, help=(
        "units of privacy in the data, a public number, such as 1e8 (default: none, give it)"))
    compute: float | None = option(None, metavar="FLOPS", check=positive, help=(
        "in all, 6 per parameter and token, such as 1e21 (default: from --gpu-hours)"))
    gpu_hours: float | None = option(None, metavar="H", check=positive, help=(
        "in place of --compute, with a throughput (default: none)"))

    tokens_per_second: float | None = option(None, group="throughput, measured in private training",
        metavar="R", check=positive, help="of one GPU (default: none, and no time is stated)")
    measured_parameters: float | None = option(None, metavar="M", check=positive, help=(
        "of the model that it was measured with (default: none)"))
    throughput_from: Path | None = option(None, metavar="FOLDER", help=(
        "results of ddp_by_hand.experiments.llama_fsdp, the fastest private row (default: none)"))
    gpus: int = option(1, "that work at this rate", metavar="N", check=positive)

    law: str = option(PUBLISHED, group="law", metavar="LAW", help=(
        "published: fitted to the paper's BERTs; or the folder of your own --calibrate"))
    parameters: tuple[float, ...] | None = option(None, metavar="M", check=positive, help=(
        "model sizes to choose from (default: nine over the law's range)"))
    calibrate: Path | None = option(None, metavar="FOLDER", help=(
        "train small models on --data, fit a law to them, predict a further run within --compute "
        "and train it (default: off); spends privacy of --data, so take public text"))
    data: str | None = option(None, metavar="SOURCE", help=(
        "of --calibrate: a file or folder of text (default: stdlib, Python's own sources)"))

    accountant: str = option("pld", "that computes the chosen noise", group="output",
        choices=("pld", "prv", "rdp"))
    output: Path = option(Path("plan.png"), "the picture", metavar="FILE", check=is_writable)
    dry_run: bool = option(False, "say what would be searched or trained, and end (default: off)")
# fmt: on

    def __post_init__(self) -> None:
        if (self.compute is None) == (self.gpu_hours is None):
            raise ValueError(f"give one of --compute and --gpu-hours: {CALL}")
        if (self.tokens_per_second is None) != (self.measured_parameters is None):
            raise ValueError(
                "--tokens-per-second and --measured-parameters belong together: a larger model is "
                f"slower in proportion; give both: {CALL} {MEASURED}"
            )
        if self.tokens_per_second is not None and self.throughput_from is not None:
            raise ValueError("give one of --tokens-per-second and --throughput-from")
        if not self.has_throughput:
            if self.gpu_hours is not None:
                raise ValueError(
                    "--gpu-hours needs a measured throughput: add --throughput-from FOLDER, or "
                    f"{MEASURED}"
                )
            if self.gpus != 1:
                raise ValueError(f"--gpus {self.gpus} needs a throughput of one: add {MEASURED}")
        if self.calibrate is not None:
            self._check_calibration()
        elif self.examples is None:
            raise ValueError(f"--examples is missing, the units of privacy in the data: {CALL}")
        elif self.data is not None:
            raise ValueError(f"--data is the text of --calibrate: {CALIBRATE} --data {self.data}")

    @property
    def has_throughput(self) -> bool:
        return self.tokens_per_second is not None or self.throughput_from is not None

    def _check_calibration(self) -> None:
        given = {
            "--examples": self.examples, "--parameters": self.parameters,
            "--gpu-hours": self.gpu_hours, "--tokens-per-second": self.tokens_per_second,
            "--throughput-from": self.throughput_from,
            "--law": None if self.law == PUBLISHED else self.law,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} does not go with --calibrate, which counts its own text, fits its own "
                    f"law and measures its own time: leave it out, {CALIBRATE}"
                )

    def throughput(self) -> Throughput | None:
        """Returns the throughput of one GPU; raises ValueError for a folder without a row."""
        if self.throughput_from is not None:
            return throughput_of(self.throughput_from)
        if self.tokens_per_second is None or self.measured_parameters is None:
            return None
        return Throughput(
            6 * self.measured_parameters * self.tokens_per_second,
            f"{self.tokens_per_second:,.0f} tokens/s with {self.measured_parameters:,.0f} "
            "parameters, as given",
        )


def throughput_of(folder: Path) -> Throughput:
    """Reads the fastest private row of `experiments.llama_fsdp`, in tokens per second and GPU."""
    needed = ("mode", "seq_length", "total_batch_size", "num_gpus", "median_time_ms")
    found = []
    for row in newest_rows(folder / "results.jsonl"):
        if row.get("status") != OK or not all(row.get(name) for name in needed):
            continue
        if row["mode"] != "no_dp" and "parameters" in row.get("config", {}):
            tokens = row["seq_length"] * row["total_batch_size"] / row["num_gpus"]
            found.append((tokens / row["median_time_ms"] * 1e3, row))
    if not found:
        raise ValueError(
            f"--throughput-from {folder}: has no finished private row of "
            "ddp_by_hand.experiments.llama_fsdp on GPUs; name a folder such as "
            "results/llama-3.2-1b-2xh200"
        )
    rate, row = max(found, key=lambda pair: pair[0])
    size = row["config"]["parameters"]
    return Throughput(
        6 * size * rate,
        f"{rate:,.0f} tokens/s per GPU with {size:,} parameters: {row['mode']}, "
        f"{row['seq_length']} tokens, {folder}",
    )
