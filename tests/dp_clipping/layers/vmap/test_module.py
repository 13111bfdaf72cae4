"""Any other module under vmap: gradients are those of one backward per sample."""

import pytest
import torch
from torch import nn

from dp_clipping.verification import reference as oracle
from tests.dp_clipping.conftest import assert_close, clipped_sums, private
from tests.support import zoo


class Scaled(nn.Module):
    """A bare parameter, two inputs, two outputs, and a number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 4))

    def forward(self, x, shift):
        return self.scale * x + shift, x.sum(-1, keepdim=True) * self.scale, "note"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled, self.convolution = Scaled(), nn.Conv1d(2, 3, 3, padding=1)

    def forward(self, x):
        y, z, note = self.scaled(x, 2 * x)
        assert note == "note"
        return self.convolution(y + z)


@pytest.mark.parametrize("mode", ["per_sample", "ghost", "bookkeeping"])
def test_sums_and_norms(mode):
    network, batch = zoo.seeded(Network).double(), zoo.numbers(4, 2, 4, out=(3, 4))
    batch = oracle.move(batch, dtype=torch.float64)
    gradients = oracle.per_sample_gradients(network, batch, zoo.product)
    norms = oracle.norms(gradients)
    limit = float(norms.median())
    model = private(network, mode, limit)
    sums = clipped_sums(model, batch)
    torch.testing.assert_close(model.per_sample_gradient_norms, norms, rtol=1e-9, atol=0)
    assert_close(sums, oracle.clipped_sum(gradients, limit), 1e-9)


class OwnHooks(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = nn.Conv1d(2, 2, 1)

    def forward(self, x):
        return self.scaled(x)


def test_hooks_run_once_and_around_the_call():
    network, calls = OwnHooks(), []
    network.scaled.register_forward_hook(lambda *_: calls.append(1))
    model = private(network, "bookkeeping")
    model(torch.randn(3, 2, 4))
    calls.clear()
    model(torch.randn(3, 2, 4))
    assert calls == [1]


class Picks(nn.Module):
    """Its shapes depend on values, which vmap cannot do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.weight)[x > 0].sum().expand(x.shape[0])


def test_what_cannot_run_is_named():
    model = private(nn.Sequential(Picks()), "bookkeeping")
    with pytest.raises(ValueError, match=r"0 \(Picks\)|samples"):
        model(torch.randn(3, 4))
