"""Norms in plain PyTorch: few calls for many small parameters."""

import torch
from torch import nn

from dp_clipping.step.sums import plain
from tests.dp_clipping.conftest import private_loss, unchecked
from tests.support import zoo

BATCH, WIDTH = 3, 5


def test_vectors_of_one_shape_share_a_call(monkeypatch):
    """Biases and scales, of which a network has hundreds; a larger gradient has its own call."""
    shapes = []
    right = plain.squared_norms

    def noted(rows):
        shapes.append(tuple(rows.shape))
        return right(rows)

    monkeypatch.setattr(plain, "squared_norms", noted)
    layers = [layer for _ in range(4) for layer in (nn.LayerNorm(WIDTH), nn.Tanh())]
    network = nn.Sequential(*layers)
    model = unchecked(network)
    x = torch.randn(BATCH, 2, WIDTH)
    private_loss(model, (x, torch.randn(BATCH, 2, WIDTH)), zoo.product).backward()
    assert shapes == [(8 * BATCH, WIDTH)]
