"""What ε depends on, as Opacus's introduction to accounting shows it.

    python -m examples.opacus_accounting
    python -m examples.opacus_accounting --engine opacus

Trains one small classifier with each accountant, and with a scheduler that lets the noise decay.
The steps are the same ones; accountants differ in how tightly they bound what the steps reveal.
(`gdp` only approximates: do not publish its ε.)
"""

import argparse
import sys
import warnings

import torch
from opacus.schedulers import ExponentialNoise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.engines import engine_classes, parser, run

ACCOUNTANTS = ("prv", "rdp", "gdp")
GAMMA = 0.9  # of the scheduler: what noise is multiplied with after each epoch


def train(options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the ε after each epoch by what was run."""
    warnings.filterwarnings("ignore", message="Optimal order is the|Secure RNG turned off")
    warnings.filterwarnings("ignore", category=UserWarning, message="GDP accounting|PRV")
    spent = {accountant: epsilons(options, accountant) for accountant in ACCOUNTANTS}
    spent["rdp, less noise"] = epsilons(options, "rdp", gamma=GAMMA)
    heads = "".join(f"  epoch {epoch + 1:2d}" for epoch in range(options.epochs))
    print(f"epsilon at delta {options.delta:g}, noise multiplier {options.noise_multiplier:g}\n")
    print(f"{'accountant':<16}{heads}")
    for name, values in spent.items():
        print(f"{name:<16}" + "".join(f"{value:10.3f}" for value in values))
    return spent


def epsilons(options: argparse.Namespace, accountant: str, gamma: float = 1.0) -> list[float]:
    """Returns ε after each epoch of a training."""
    PrivacyEngine, _ = engine_classes(options.engine)
    torch.manual_seed(options.seed)
    data = TensorDataset(torch.randn(512, 4), torch.randint(2, (512,)))
    network = nn.Linear(4, 2)
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, criterion, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=options.learning_rate),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=options.batch_size),
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=options.max_grad_norm,
        grad_sample_mode="ghost",
    )
    scheduler = ExponentialNoise(optimizer, gamma=gamma)
    found = []
    for _ in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        found.append(float(engine.get_epsilon(options.delta)))
        if gamma != 1:
            scheduler.step()
    return found


def options() -> argparse.ArgumentParser:
    made = parser("opacus_accounting", "Compare what accountants say of the same steps.")
    made.add_argument(
        "--noise-multiplier", type=float, default=1.0, metavar="N",
        help="noise over clipping norm; stands in for --epsilon here (1.0)",
    )  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(run(options(), train))
