"""Dropout that is off, and random numbers whose amount depends on values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dp_clipping.trials.draws import without_dropout
from tests.dp_clipping.conftest import private
from tests.support import zoo


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5), lambda x: F.dropout(input=x),
        lambda x: torch.dropout(x, 0.5, True), nn.Dropout(0.5),
    ],
    ids=["functional", "keyword", "torch", "module"],
)  # fmt: skip
def test_dropout_is_off_inside_and_on_afterwards(drop):
    is_module = isinstance(drop, nn.Module)
    network, x = nn.Sequential(drop if is_module else nn.ReLU()), torch.ones(64)
    with without_dropout(network) as mode:
        assert torch.equal(drop(x), x)
        assert torch.equal(F.dropout(x, 0.5, False), x)
    assert mode.was_needed == (not is_module)
    assert (drop(x) == 0).any()
    with without_dropout(network, in_functions=False):
        assert torch.equal(drop(x), x) == is_module


def test_attention_drops_nothing_inside():
    q = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with without_dropout(nn.ReLU()) as mode:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert not mode.was_needed
        for found in (
            F.scaled_dot_product_attention(q, q, q, None, 0.5, True),
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True),
        ):
            torch.testing.assert_close(found, expected)
        assert mode.was_needed


def noisy(draw):
    """Draws random numbers, how many depends on the values of some samples."""
    return zoo.Net(
        lambda net, x: net.last(draw(net.first(x))), first=nn.Linear(6, 6), last=nn.Linear(6, 3)
    )


def variates(kind):
    return lambda x: kind(F.softplus(x) + 0.1).rsample()


BY_VALUES = {
    "rrelu": nn.RReLU(),
    "rrelu of torch": lambda x: torch.rrelu(x, training=True),
    "poisson": lambda x: x + torch.poisson(F.softplus(x).detach() * 3),
    "binomial": lambda x: x + torch.binomial(torch.full_like(x, 9), torch.sigmoid(x).detach()),
    "gamma": variates(lambda a: torch.distributions.Gamma(a, 1.0)),
    "beta": variates(lambda a: torch.distributions.Beta(a, torch.ones_like(a))),
    "dirichlet": variates(torch.distributions.Dirichlet),
}


@pytest.mark.parametrize("draw", BY_VALUES.values(), ids=BY_VALUES)
def test_noise_whose_amount_depends_on_values_is_no_mixing(draw):
    for seed in range(3):
        torch.manual_seed(seed)
        model = private(noisy(draw), "bookkeeping")
        for _ in range(2):
            model(torch.randn(8, 6))


@pytest.mark.parametrize("draw", BY_VALUES.values(), ids=BY_VALUES)
def test_mixing_before_such_noise_is_found(draw):
    torch.manual_seed(0)
    model = private(noisy(lambda x: draw(x - x.mean(0))), "bookkeeping")
    with pytest.raises(ValueError, match="depends on the other samples"):
        model(torch.randn(8, 6))


def test_mixing_behind_it_is_found():
    torch.manual_seed(0)
    model = private(noisy(lambda x: torch.rrelu(x, training=True).cumsum(0)), "bookkeeping")
    with pytest.raises(ValueError, match="depends on the other samples"):
        model(torch.randn(8, 6))
