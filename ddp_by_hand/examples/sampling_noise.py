"""Prints the noise that each sampling needs for a target ε: `examples.sampling_noise`.

Nothing is trained: `make_private_with_epsilon` finds σ, which depends on public numbers only.
"""

import sys
import warnings
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.measure.command_line import bad_input
from ddp_by_hand.measure.options import option, positive, program, requires
from dp_clipping import PrivacyEngine


@dataclass(frozen=True)
class Options:
    samples: int = option(50_000, "units of privacy in the data", check=positive)
    batch_size: int = option(500, "units expected in a batch", check=positive)
    max_batch_size: int = option(600, "cap of truncated Poisson batches", check=positive)
    epochs: tuple[int, ...] = option((1, 10), "one row for each", check=positive)
    epsilons: tuple[float, ...] = option((2.0, 8.0), "one row for each", check=positive)
    delta: float = option(
        1e-6, "δ of the guarantee",
        check=requires(lambda x: 0 < x < 1, "{}: give a number between 0 and 1"),
    )  # fmt: skip


def noise_for(sampling: str, epochs: int, epsilon: float, options: Options) -> float:
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


@program("sampling_noise", Options)
@bad_input()
def main(options: Options) -> int:
    samplings = ("poisson", "truncated_poisson", "balls_in_bins", "cyclic")
    print("| epochs | ε |", " | ".join(samplings), "|")
    print("| --- " * (2 + len(samplings)) + "|")
    for epochs in options.epochs:
        for epsilon in options.epsilons:
            found = [f"{noise_for(s, epochs, epsilon, options):.3f}" for s in samplings]
            print(f"| {epochs} | {epsilon:g} |", " | ".join(found), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
