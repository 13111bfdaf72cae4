"""A layer in float32 before one in float64: norms, and so coefficients, are float64 for both."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dp_clipping import register_layer
from tests.support.engine import build, step

LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "conv": lambda: nn.Conv1d(5, 3, 2),
    "norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(5, 5),
    "recurrent": lambda: nn.GRU(4, 3, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "embedding": lambda: nn.Embedding(7, 3),
    "bag": lambda: nn.EmbeddingBag(7, 3),
}


class Scaled(nn.Module):
    """Registered, with functions of its norm and its sum."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


register_layer(
    Scaled,
    norm=lambda layer, g, x: {"scale": torch.linalg.vector_norm((g * x).sum(1), dim=1)},
    weighted_sum=lambda layer, g, c, x: {"scale": torch.einsum("b,btd,btd->d", c, g, x)},
)
LAYERS["registered"] = Scaled
OF_TOKENS = ("embedding", "bag")


class Network(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(2, dtype=torch.float64)

    def forward(self, x):
        y = self.layer(x)
        y = y[0] if isinstance(y, tuple) else y
        return self.head(y.double().flatten(1))


@pytest.mark.parametrize("mode", ["ghost", "bookkeeping"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_is_as_defined(kind, mode):
    torch.manual_seed(0)
    x = torch.randint(7, (12, 5)) if kind in OF_TOKENS else torch.randn(12, 5, 4)
    network = Network(LAYERS[kind]())
    network(x)  # makes the head
    data = TensorDataset(x, torch.randint(2, (12,)))
    run = build(module=network, dataset=data, max_grad_norm=0.1, grad_sample_mode=mode)
    for batch in run.loader:
        step(run, batch)
    assert run.engine.check(run.model, (x, torch.randint(2, (12,)))).ok
    assert network.head.weight.dtype == torch.float64
    assert {p.dtype for p in network.layer.parameters()} == {torch.float32}
