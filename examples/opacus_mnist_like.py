"""An image classifier, as Opacus's tutorial makes one private in ghost mode.

    python -m examples.opacus_mnist_like
    python -m examples.opacus_mnist_like --engine opacus

The network has batch normalisation, which mixes samples, until `PrivacyEngine`'s own validator has
replaced it by group normalisation. Images are ten patterns of 14 × 14 pixels under noise.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.engines import engine_classes, parser, run

CLASSES, SIDE = 10, 14


class Network(nn.Module):
    """images [B, 1, 14, 14] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(32 * 4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


def make_images(count: int) -> TensorDataset:
    """A class for each image and its pattern, somewhat noisy."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE)
    labels = torch.randint(CLASSES, (count,))
    return TensorDataset(patterns[labels] + 0.5 * torch.randn(count, 1, SIDE, SIDE), labels)


def train(options: argparse.Namespace) -> dict[str, float]:
    """First and last epoch's mean loss, which ε does not cover, and ε."""
    PrivacyEngine, BatchMemoryManager = engine_classes(options.engine)
    torch.manual_seed(options.seed)
    loader = DataLoader(make_images(1024), batch_size=options.batch_size)
    engine = PrivacyEngine()
    network = engine.get_compatible_module(Network())
    optimizer = torch.optim.Adam(network.parameters(), lr=options.learning_rate)
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=options.max_grad_norm,
        grad_sample_mode="ghost",
    )
    model.train()
    means = []
    for epoch in range(options.epochs):
        losses = []
        with BatchMemoryManager(
            data_loader=loader,
            max_physical_batch_size=options.max_physical_batch_size,
            optimizer=optimizer,
        ) as microbatches:
            for images, labels in microbatches:
                optimizer.zero_grad()
                loss = criterion(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        print(
            f"epoch {epoch + 1}: epsilon {engine.get_epsilon(options.delta):.2f} at delta "
            f"{options.delta:g}; loss {means[-1]:.3f} (not covered by epsilon)"
        )
    return {
        "first": means[0], "last": means[-1], "epsilon": engine.get_epsilon(options.delta),
        "noise_multiplier": float(optimizer.noise_multiplier),
    }  # fmt: skip


def options() -> argparse.ArgumentParser:
    return parser("opacus_mnist_like", "Train a small CNN privately on synthetic images.")


if __name__ == "__main__":
    sys.exit(run(options(), train))
