"""Two processes that train one classifier, as Opacus's tutorial on data parallelism does it.

    python -m examples.opacus_distributed                      starts two processes itself
    python -m examples.opacus_distributed --engine opacus
    torchrun --nproc_per_node=4 -m examples.opacus_distributed

`--batch-size` counts the samples of all processes together. Each process samples from the data on
its own, clips, and adds its share of the noise; the sums are exchanged. Samples are points around
four centres.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.engines import checked, data_parallel, engine_classes, parser
from lm.launch import run_ranks
from lm.runtime import find_hardware, launched, process_group

CENTRES, WIDTH = 4, 8


def make_points(count: int) -> TensorDataset:
    """Points [count, 8] and which centre each is near to."""
    labels = torch.arange(count) % CENTRES
    centres = 2 * torch.randn(CENTRES, WIDTH)
    return TensorDataset(centres[labels] + torch.randn(count, WIDTH), labels)


def train(options: argparse.Namespace) -> dict[str, float | list[Tensor]]:
    """First and last epoch's mean loss, which ε does not cover, ε, and the trained parameters."""
    PrivacyEngine, _ = engine_classes(options.engine)
    torch.manual_seed(options.seed)  # the same data and first parameters on every rank
    points = make_points(1024)
    network = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CENTRES))
    wrapped = data_parallel(options.engine, network)
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=wrapped,
        optimizer=torch.optim.Adam(wrapped.parameters(), lr=options.learning_rate),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(points, batch_size=options.batch_size),
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=options.max_grad_norm,
        grad_sample_mode="ghost",
    )
    means = []
    for epoch in range(options.epochs):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}: epsilon {engine.get_epsilon(options.delta):.2f} at delta "
                f"{options.delta:g}; loss {means[-1]:.3f} of rank 0 (not covered by epsilon)"
            )
    return {
        "first": means[0], "last": means[-1], "epsilon": engine.get_epsilon(options.delta),
        "noise_multiplier": float(optimizer.noise_multiplier),
        "parameters": [p.detach().clone() for p in network.parameters()],
    }  # fmt: skip


def options() -> argparse.ArgumentParser:
    return parser("opacus_distributed", "Train one classifier privately in several processes.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    found = checked(options(), arguments)
    if not launched():
        command = [sys.executable, "-m", "examples.opacus_distributed", *arguments]
        return run_ranks(command, 2).status
    with process_group(find_hardware("cpu"), timeout_s=600):
        train(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
