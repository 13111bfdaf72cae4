"""Noise of `experiments.price --noise`: alone, and in steps that differ in nothing else."""

from collections.abc import Sequence

import torch

from ddp_by_hand.experiments.llama_fsdp.network import random_batch
from ddp_by_hand.experiments.price.models import MODELS
from ddp_by_hand.experiments.price.options import DEFAULT_NOISE, SECURE, Options
from ddp_by_hand.experiments.rounds import RoundCell, Row, costs_of
from ddp_by_hand.experiments.training import Batch, ClassifierTraining
from ddp_by_hand.lm.timing import time_steps
from dp_clipping import CorrelatedNoise, PrivacyEngine
from dp_clipping.noise.add_noise import AddressedNoise, NoiseSource, source_of
from dp_clipping.noise.secure.source import SecureNoise

ALONE = "alone"  # a row: noise without a step
LEGEND = (
    "alone: noise on float32 sums of all parameters, without a step; other rows: a step on so many",
    "  samples x tokens, of which --part are computed at once; noise is added once in each",
)
SEED_KEY = bytes(range(32))  # of noise that is timed and not used
TIMES_ALONE = 5  # noise alone is added so many times for each step, as the first is launched late


class NoisySteps:
    """A private network in training, whose noise is exchanged; see `lm.timing.Trainee`.

    A batch is a list of parts; an empty one is noise alone.

    Attributes:
        names, totals: of all parameters, and float32 zeros of their shapes.
        numel: numbers in all of them.
    """

    def __init__(self, options: Options, device: torch.device):
        torch.manual_seed(0)
        network = MODELS[options.model].build(options.layers, device)
        self.training = ClassifierTraining(network, device)
        self.training.make_private(
            PrivacyEngine(accountant="rdp"), options.part, noise_multiplier=1.0, max_grad_norm=1.0
        )
        parameters = dict(network.named_parameters())
        self.names = list(parameters)
        self.totals = [torch.zeros(p.shape, device=device) for p in parameters.values()]
        self.numel = sum(total.numel() for total in self.totals)
        self._options, self._device = options, device
        self._parts: Sequence[Batch] = ()
        self._alone = 0

    def source(self, noise: str) -> NoiseSource:
        """Returns the noise of this name."""
        if noise == DEFAULT_NOISE:
            return AddressedNoise()
        if noise == SECURE:
            return SecureNoise(self.numel)
        return source_of(CorrelatedNoise(bands_of(noise)))

    def parts(self, row: Row) -> list[Batch]:
        """Returns the parts of a batch of this row."""
        size = min(self._options.part, row.samples)
        vocabulary = MODELS[self._options.model].shape.vocabulary
        generator = torch.Generator(self._device).manual_seed(1)
        part = random_batch((size, row.tokens), vocabulary, generator)
        return [part] * (row.samples // size)

    def backward(self, parts: Sequence[Batch]) -> None:
        """Sums all parts."""
        self._parts = parts
        for number, part in enumerate(parts, 1):
            self.training.optimizer.signal_skip_step(number < len(parts))
            self.training.backward(part)
            if number < len(parts):
                self.training.step()

    def step(self) -> None:
        """Adds noise to the sums and takes the step, or adds it to zeros, with all bands."""
        if self._parts:
            self.training.step()
            return
        self._alone += 1
        self.training.optimizer.noise.source.add(
            self.totals, self.names, key=SEED_KEY, step=1000 + self._alone, std=1.0, divisor=1.0,
            dtypes=[torch.bfloat16] * len(self.totals),
        )  # fmt: skip

    def measure(self, cell: RoundCell) -> dict:
        self.training.optimizer.noise.source = self.source(cell.variant)
        is_alone = cell.row == ALONE
        batch = [] if is_alone else self.parts(cell.row)
        # Noise of earlier steps is in a step once there were so many of them.
        warm_up = 1 if cell.round else max(self._options.warm_up, bands_of(cell.variant))
        times = self._options.steps * (TIMES_ALONE if is_alone else 1)
        found = costs_of(time_steps(self, [batch] * (warm_up + times), warm_up, self._device))
        if is_alone:
            del found["without_step_ms"]
        return found


def bands_of(noise: str) -> int:
    """Returns the number of steps whose noise is in one."""
    return 1 if noise in (DEFAULT_NOISE, SECURE) else int(noise.removeprefix("bands_"))
