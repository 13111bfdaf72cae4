"""Prints the noise that each sampling needs for a target ε: `examples.sampling_noise`.

Nothing is trained: `make_private_with_epsilon` finds σ, which depends on public numbers only.
"""

import argparse
import warnings
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine


def noise_for(sampling: str, epochs: int, epsilon: float, options: argparse.Namespace) -> float:
    """Returns σ with which so many epochs end at (ε, δ)."""
    network = torch.nn.Linear(1, 2)
    data = TensorDataset(torch.zeros(options.samples, 1), torch.zeros(options.samples).long())
    cap = {"max_batch_size": options.max_batch_size} if sampling == "truncated_poisson" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus, about the bound with which its search begins
        _, optimizer, _, _ = PrivacyEngine(accountant="prv").make_private_with_epsilon(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=options.batch_size),
            target_epsilon=epsilon,
            target_delta=options.delta,
            epochs=epochs,
            max_grad_norm=1.0,
            epsilon_tolerance=1e-3,
            sampling=sampling,
            **cap,
        )
    return optimizer.noise_multiplier


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_by_hand.examples.sampling_noise", description=__doc__
    )
    parser.add_argument("--samples", type=int, default=50_000, help="units of privacy in the data")
    parser.add_argument("--batch-size", type=int, default=500, help="units expected in a batch")
    parser.add_argument(
        "--max-batch-size", type=int, default=600, help="cap of truncated Poisson batches"
    )
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 10], help="one row for each")
    parser.add_argument(
        "--epsilons", type=float, nargs="+", default=[2.0, 8.0], help="one row for each"
    )
    parser.add_argument("--delta", type=float, default=1e-6, help="δ of the guarantee")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    samplings = ("poisson", "truncated_poisson", "balls_in_bins", "cyclic")
    print("| epochs | ε |", " | ".join(samplings), "|")
    print("| --- " * (2 + len(samplings)) + "|")
    for epochs in options.epochs:
        for epsilon in options.epsilons:
            found = [f"{noise_for(s, epochs, epsilon, options):.3f}" for s in samplings]
            print(f"| {epochs} | {epsilon:g} |", " | ".join(found), "|", flush=True)


if __name__ == "__main__":
    main()
