"""Pretraining on images that are drawn here, which costs no privacy.

In the manner of DP-RandP (Tang et al. 2023, arXiv:2306.06076): features are learned from synthetic
images by alignment and uniformity (Wang and Isola 2020), then all parameters are trained privately.
The images are dead leaves (Lee, Mumford and Huang 2001): shapes that cover each other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_by_hand.experiments.records.views import views

SHAPES, BATCH, RATE, WARMTH = 24, 512, 1e-3, 2.0
JITTER = 0.3  # of contrast and brightness, between two views of an image


def dead_leaves(count: int, side: int, device: torch.device) -> Tensor:
    """Returns images [count, 1, side, side] from −1 to 1 of discs and bars, one on another."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(SHAPES, count, 1, 1, device=device)

    place = torch.linspace(-1, 1, side, device=device)
    columns, rows = place, place[:, None]
    images = uniform(-1, 1)[0].expand(count, side, side)
    right, down, size = uniform(-1, 1), uniform(-1, 1), uniform(0.05, 0.7)
    angle, length, grey = uniform(0, torch.pi), uniform(1, 4), uniform(-1, 1)
    for s in range(SHAPES):
        x, y = columns - right[s], rows - down[s]
        along = (x * angle[s].cos() + y * angle[s].sin()) / length[s]
        across = y * angle[s].cos() - x * angle[s].sin()
        is_disc = torch.rand(count, 1, 1, device=device) < 0.5
        inside = torch.where(
            is_disc, along**2 + across**2 < size[s] ** 2 / 4,
            torch.maximum(along.abs(), across.abs()) < size[s] / 3,
        )  # fmt: skip
        images = torch.where(inside, grey[s], images)
    return images[:, None]


def pretrain(network: nn.Sequential, steps: int, side: int = 28) -> None:
    """Trains all layers but the last on dead leaves: two views alike, other images apart."""
    if not steps:
        return
    body, device = network[:-1], next(network.parameters()).device
    optimizer = torch.optim.Adam(body.parameters(), lr=RATE)
    for _ in range(steps):
        images = dead_leaves(BATCH, side, device)
        one, other = (F.normalize(body(_jittered(views(images)))) for _ in range(2))
        alignment = (one - other).square().sum(1).mean()
        apart = torch.pdist(one).square().mul(-WARMTH).exp().mean().log()
        optimizer.zero_grad()
        (alignment + apart).backward()
        optimizer.step()
    optimizer.zero_grad()


def _jittered(images: Tensor) -> Tensor:
    """Returns images with another contrast and brightness each."""
    contrast, brightness = JITTER * torch.randn(2, len(images), 1, 1, 1, device=images.device)
    return images * (1 + contrast) + brightness
