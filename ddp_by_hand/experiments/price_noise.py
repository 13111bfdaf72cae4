#!/usr/bin/env python3
"""Measures what noise costs: alone, and in private steps of a Llama that differ in it only.

    python -m ddp_by_hand.experiments.price_noise    the 1B shape on one GPU
    python -m ddp_by_hand.experiments.price_noise --noise default bands_2 bands_4 bands_8 bands_16
    python -m ddp_by_hand.experiments.price_noise --model tiny --rows 4x32 8x32 --part 4  no a GPU

`default` is independent Gaussian noise, `secure` that of PrivacyEngine(secure_mode=True), `bands_8`
that of CorrelatedNoise(bands=8). They take turns on one private network, in interleaved rounds.
`alone` is the noise on float32 sums of all its parameters, which become bfloat16. A row of more
samples than --part is a logical batch: its parts are summed, and noise is added once. Ratios are
to the default noise of the same rounds.
"""

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddp_by_hand.experiments.price.__main__ import batch_of
from ddp_by_hand.experiments.price.models import MODELS
from ddp_by_hand.experiments.rounds import (
    RoundCell,
    RoundOptions,
    Row,
    device_for,
    row_of,
    run_program,
)
from ddp_by_hand.experiments.training import Batch, ClassifierTraining
from ddp_by_hand.lm.timing import MIB, PeakMemory, StepClock, wait_for_all
from ddp_by_hand.measure.options import option, positive, program
from dp_clipping import CorrelatedNoise, PrivacyEngine
from dp_clipping.noise.add_noise import AddressedNoise, NoiseSource, source_of
from dp_clipping.noise.secure.source import SecureNoise

DEFAULT, SECURE = "default", "secure"
ALONE = "alone"
LEGEND = (
    "alone: noise on float32 sums of all parameters, without a step; other rows: a step on so many",
    "  samples x tokens, of which --part are computed at once; noise is added once in each",
)
SEED_KEY = bytes(range(32))  # of noise that is timed and not used
WARM_UP = 3  # steps of each noise on each row, before its first round
TIMES_ALONE = 5  # noise alone is added so many times for each step, as the first is launched late


def noise_of(text: str) -> str:
    """Parses `default`, `secure` or such as `bands_8`."""
    if text not in (DEFAULT, SECURE) and not re.fullmatch(r"bands_[1-9]\d*", text):
        raise ArgumentTypeError(f"{text!r} is none of default, secure, and such as bands_8")
    return text


def bands_of(noise: str) -> int:
    """Returns the number of steps whose noise is in one."""
    return 1 if noise in (DEFAULT, SECURE) else int(noise.removeprefix("bands_"))


# fmt: off
@dataclass(frozen=True)
class Options(RoundOptions):
    model: str = option(next(iter(MODELS)), "shape of the network", choices=tuple(MODELS))
    layers: int | None = option(None, "decoder layers (default: the model's)", check=positive)
    rows: tuple[Row, ...] = option((Row(8, 1024), Row(64, 1024)), metavar="BxT", type=row_of,
        unique=True, help="samples x tokens of a logical batch")
    part: int = option(8, "samples of a batch that are computed at once", check=positive)
    noise: tuple[str, ...] = option((DEFAULT, SECURE, "bands_8"), metavar="NOISE", type=noise_of,
        unique=True, help="default, secure, and such as bands_8")
    rounds: int = option(5, "rounds in which they take turns", check=positive)
    steps: int = option(2, "timed steps per round", check=positive)
# fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if DEFAULT not in self.noise:
            raise ValueError(f"--noise has no {DEFAULT}, to which ratios are: add it")
        for row in self.rows:
            if row.samples > self.part and row.samples % self.part:
                raise ValueError(
                    f"--rows {row} has no whole number of parts of {self.part}: give another "
                    "--part or another number of samples"
                )


class Steps:
    """A private network in training, whose noise is exchanged.

    Attributes:
        names, totals: of all parameters, and float32 zeros of their shapes.
        numel: numbers in all of them.
    """

    def __init__(self, options: Options, device: torch.device):
        model = MODELS[options.model]
        torch.manual_seed(0)
        network = model.build(options.layers or model.layers, device)
        self.training = ClassifierTraining(network, device)
        self.training.make_private(
            PrivacyEngine(accountant="rdp"), options.part, noise_multiplier=1.0, max_grad_norm=1.0
        )
        parameters = dict(network.named_parameters())
        self.names = list(parameters)
        self.totals = [torch.zeros(p.shape, device=device) for p in parameters.values()]
        self.numel = sum(total.numel() for total in self.totals)
        self._vocabulary, self._device = model.shape.vocabulary, device
        self._alone = 0

    def source(self, noise: str) -> NoiseSource:
        """Returns the noise of this name."""
        if noise == DEFAULT:
            return AddressedNoise()
        if noise == SECURE:
            return SecureNoise(self.numel)
        return source_of(CorrelatedNoise(bands_of(noise)))

    def parts(self, row: Row, most: int) -> list[Batch]:
        """Returns the parts of a batch of this row."""
        size = min(most, row.samples)
        part = batch_of(Row(size, row.tokens), self._vocabulary, self._device)
        return [part] * (row.samples // size)

    def step(self, parts: Sequence[Batch]) -> None:
        """Takes one step on the sum of these parts."""
        training = self.training
        for number, part in enumerate(parts, 1):
            training.optimizer.signal_skip_step(number < len(parts))
            training.backward(part)
            training.step()

    def add_alone(self, source: NoiseSource) -> None:
        """Adds noise to zeros, of a step that has all bands."""
        self._alone += 1
        source.add(
            self.totals, self.names, key=SEED_KEY, step=1000 + self._alone, std=1.0, divisor=1.0,
            dtypes=[torch.bfloat16] * len(self.totals),
        )  # fmt: skip


def measure(cell: RoundCell, steps: Steps, options: Options, device: torch.device) -> dict:
    source = steps.source(cell.variant)
    steps.training.optimizer.noise.source = source
    parts = [] if cell.row == ALONE else steps.parts(cell.row, options.part)
    run = (lambda: steps.step(parts)) if parts else (lambda: steps.add_alone(source))
    times = options.steps if parts else TIMES_ALONE * options.steps
    # Noise of earlier steps is in a step once there were so many of them.
    for _ in range(1 if cell.round else max(WARM_UP, bands_of(cell.variant))):
        run()
    wait_for_all(device)
    clock, memory = StepClock(device), PeakMemory(device)
    clock.mark()
    for _ in range(times):
        run()
        clock.mark()
    return {"step_ms": clock.milliseconds(), "peak_memory_mb": (memory.bytes() or 0) / MIB}


@program("ddp_by_hand.experiments.price_noise", Options)
def main(options: Options) -> int:
    """Measures all cells. Returns 1 if one failed."""
    device = device_for(options.model)
    steps = Steps(options, device)
    print(f"{options.model}: {steps.numel:,} parameters", flush=True)
    config = {"model": options.model, "layers": options.layers, "part": options.part}
    return run_program(
        options, (ALONE, *options.rows), options.noise,
        lambda cell: measure(cell, steps, options, device), config, device, ("", *LEGEND),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
