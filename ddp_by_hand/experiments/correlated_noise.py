#!/usr/bin/env python3
"""Compares Poisson DP-SGD with correlated noise on cyclic batches, at equal (ε, δ).

    python -m ddp_by_hand.experiments.correlated_noise  ten minutes on two cores at most
    python -m ddp_by_hand.experiments.correlated_noise --epsilons 8 --bands 8 64 --seeds 3

Both train the last layer of a classifier of digits (`examples.font_digits`, one picture is the unit
of privacy) with plain SGD from zero, on features of one layer of fixed random filters. Batch size,
epochs and clipping are the same, and so is the choice of the learning rate: the best of one grid on
other pictures, with another seed. Accuracies are those of a running mean of the parameters and of
the last ones, on pictures that no run has seen, over seeds of sampling and noise.

ε of Poisson batches is for adding or removing a picture, ε of cyclic batches for replacing one by
an empty one. In both a picture moves the sum of a step by at most C.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples.font_digits import font_digits
from ddp_by_hand.measure import Column, format_table
from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import option, positive, program
from dp_clipping import CorrelatedNoise, PrivacyEngine

SIZE, HELD_OUT = 12, 4096  # pixels of a side; pictures to scale features, to tune, and to test
DECAY = 0.98  # of the running mean of the parameters, a step
TUNING_SEED = 1000
COLUMNS = (
    Column("ε", format="g"), Column("noise, batches"), Column("σ", format=".3f"),
    Column("rate", format="g"), Column("mean of parameters, %"), Column("last parameters, %"),
    Column("s", format=".1f"),
)  # fmt: skip

Pictures = tuple[Tensor, Tensor]  # features and digits
Train = Callable[[float, int, Pictures], tuple[float, ...]]


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of the programs that compare trainings on these pictures."""

    epsilons: tuple[float, ...] = option((2.0, 8.0), "budgets", metavar="ε", check=positive)
    delta: float = option(1e-5, "the other half of each budget", check=positive)
    seeds: int = option(5, "runs of each", check=positive)
    pictures: int = option(32768, "to train on", check=positive)
    filters: int = option(64, "random ones; a picture has 32 features of each", check=positive)


# fmt: off
@dataclass(frozen=True)
class Options(ComparisonOptions):
    bands: tuple[int, ...] = option((2, 8, 32), "of correlated noise, each with the coefficients "
        "of √(1 - x) and with those for the epochs of the run", check=positive)
    batches: int = option(256, "of an epoch", check=positive)
    epochs: int = option(1, "of each run", check=positive)
    learning_rates: tuple[float, ...] = option((8.0, 16.0, 32.0, 64.0, 128.0), "that are tried",
        check=positive)
# fmt: on

    def __post_init__(self) -> None:
        if self.batches > self.pictures:
            raise ValueError(f"--batches {self.batches}: give at most {self.pictures}, --pictures")


@dataclass(frozen=True)
class Split:
    """Features and digits of the pictures to train on, to choose a learning rate, and to test."""

    training: TensorDataset
    tuning: Pictures
    test: Pictures


@program("ddp_by_hand.experiments.correlated_noise", Options, needs=["matplotlib"])
@bad_input()
def main(options: Options) -> int:
    methods: dict[str, dict[str, Any]] = {"independent, poisson": {}}
    for bands in options.bands:
        for name, epochs in (("√(1 - x)", None), ("planned", options.epochs)):
            noise = CorrelatedNoise(bands, epochs)
            method = {"noise_mechanism": noise, "sampling": "cyclic"}
            methods[f"{bands} bands {name}, cyclic"] = method
    compare(options, COLUMNS, methods.items(), partial(measured, options))
    return 0


def compare(
    options: ComparisonOptions,
    columns: Sequence[Column],
    methods: Iterable[Any],
    measured: Callable[[Split, float, Any], dict[str, Any]],
) -> None:
    """Measures all methods at all budgets, and prints a table; a row when it is there, too."""
    warnings.filterwarnings("ignore", "noise and sampling come from a fixed seed")
    torch.set_num_threads(1)  # tensors are too small for more
    split = split_of(options.pictures, options.filters)
    rows = []
    for epsilon, method in product(options.epsilons, methods):
        rows.append(measured(split, epsilon, method))
        print(*rows[-1].values(), file=sys.stderr)
    print(format_table(columns, rows))


def measured(
    options: Options, split: Split, epsilon: float, named: tuple[str, dict[str, Any]]
) -> dict[str, Any]:
    """Returns the row of a table: σ, learning rate, accuracies with their standard deviation."""
    name, method = named
    size = options.pictures // options.batches
    sigma = noise_multiplier(options, split, size, epsilon, epochs=options.epochs, **method)

    def train(rate: float, seed: int, pictures: Pictures) -> tuple[float, float]:
        """Returns accuracies of the running mean of the parameters, and of the last ones."""
        mean = torch.zeros(10, split.test[0].shape[1])
        steps = trained(split, rate, size, seed, sigma, options.epochs, **method)
        for step, weight in enumerate(steps, start=1):
            mean.lerp_(weight, 1 - min(DECAY, step / (step + 9)))
        return accuracy(mean, pictures), accuracy(weight, pictures)

    rate, runs, seconds = tuned(options, split, train)
    mean, last = zip(*runs, strict=True)
    found = (epsilon, name, sigma, rate, shown(mean), shown(last), seconds)
    return dict(zip((column.key for column in COLUMNS), found, strict=True))


def tuned(options: Any, split: Split, train: Train) -> tuple[float, list[tuple[float, ...]], float]:
    """Returns the best learning rate, runs with it on the test's pictures, and seconds of each.

    `train` takes a learning rate, a seed and pictures, and returns accuracies on these, of which
    the first one counts.
    """
    rates = options.learning_rates
    rate = max(rates, key=lambda rate: (train(rate, TUNING_SEED, split.tuning)[0], rate))
    began = time.perf_counter()
    runs = [train(rate, seed, split.test) for seed in range(options.seeds)]
    return rate, runs, (time.perf_counter() - began) / options.seeds


def shown(accuracies: Sequence[float]) -> str:
    """Returns mean ± standard deviation in percent."""
    percent = [100 * accuracy for accuracy in accuracies]
    spread = statistics.stdev(percent) if len(percent) > 1 else 0.0
    return f"{statistics.mean(percent):.1f} ± {spread:.1f}"


def noise_multiplier(
    options: Any, split: Split, batch_size: int, epsilon: float, **method: Any
) -> float:
    """Returns σ with which a run ends at (ε, δ)."""
    _, optimizer, *_ = PrivacyEngine().make_private_with_epsilon(
        **made(split, 1.0, batch_size), **method, target_epsilon=epsilon,
        target_delta=options.delta,
    )  # fmt: skip
    return optimizer.noise_multiplier


def made(split: Split, rate: float, batch_size: int) -> dict[str, Any]:
    """Returns what `make_private` takes, with a new network of zeros."""
    network = nn.Linear(split.test[0].shape[1], 10, bias=False)
    nn.init.zeros_(network.weight)
    return {
        "module": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=rate),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(split.training, batch_size),
        "max_grad_norm": 1.0,
        "grad_sample_mode": "bookkeeping",
    }


def trained(
    split: Split, rate: float, batch_size: int, seed: int, sigma: float, epochs: int = 1,
    **method: Any,
) -> Iterator[Tensor]:  # fmt: skip
    """Trains from zero, and yields the weight after each step."""
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        **made(split, rate, batch_size), **method, noise_multiplier=sigma,
        noise_generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    (weight,) = model.parameters()
    for _ in range(epochs):
        for features, digits in loader:
            criterion(model(features), digits).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield weight.detach()


def accuracy(weight: Tensor, pictures: Pictures) -> float:
    features, digits = pictures
    return (features @ weight.T).argmax(1).eq(digits).float().mean().item()


def split_of(count: int, filters: int) -> Split:
    """Draws the pictures, and computes their features."""
    pictures, digits = font_digits(count + 3 * HELD_OUT, SIZE, 0)
    features = features_of(pictures, filters)
    public, *held_out, training = features.split([HELD_OUT] * 3 + [count])
    training, *held_out = (F.normalize((x - public.mean(0)) / public.std(0)) for x in (
        training, *held_out))  # fmt: skip
    _, tuning, test, answers = digits.split([HELD_OUT] * 3 + [count])
    return Split(TensorDataset(training, answers), (held_out[0], tuning), (held_out[1], test))


@torch.no_grad()
def features_of(pictures: Tensor, filters: int) -> Tensor:
    """Returns both signs of random filters' responses, pooled: [count, 32 · filters]."""
    kernels = torch.randn(filters, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    kernels -= kernels.mean((1, 2, 3), keepdim=True)
    kernels /= kernels.flatten(1).norm(dim=1)[:, None, None, None]
    found = []
    for some in pictures.split(2048):
        response = F.conv2d(some, kernels)
        both = torch.cat((response.relu(), (-response).relu()), dim=1)
        found.append(F.avg_pool2d(both, 2).flatten(1))
    return torch.cat(found)


if __name__ == "__main__":
    sys.exit(main())
