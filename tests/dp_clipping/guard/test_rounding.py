"""What kernels round is no mixing, and what mixes beside it is found."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dp_clipping.conftest import private
from tests.support import zoo


class Ordered(torch.autograd.Function):
    """Sums tokens [B, T, d] one after another, from the last one on where there are many samples.

    As libraries that choose a kernel by the shape: results differ by rounding alone.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[1]
        return in_order(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:, None].expand(-1, ctx.length, -1)


class Spread(torch.autograd.Function):
    """Repeats [B, d] for T tokens; the gradients of these are summed as `Ordered` does."""

    @staticmethod
    def forward(ctx, x, length):
        return x[:, None].repeat(1, length, 1)

    @staticmethod
    def backward(ctx, gradient):
        return in_order(gradient), None


def in_order(x):
    tokens = x.unbind(1) if len(x) <= 3 else x.flip(1).unbind(1)
    return functools.reduce(torch.add, tokens)


def pool():
    """Sums tokens in a module with a parameter of its own."""
    return zoo.Net(lambda net, x: Ordered.apply(x) * net.scale, scale=nn.Parameter(torch.ones(5)))


def gradients_that_cancel(net, x):
    """The gradient of each token's sign is that of all tokens, and their sum is small."""
    signs = torch.linspace(-1, 1, x.shape[1])[:, None] * 1e4
    tokens = Spread.apply(net.first(x[:, 0]), x.shape[1])
    return net.second((tokens * signs).sum(1) + net.first(x[:, 1]))


ROUNDED_BY_SIZE = {
    "of the arguments": lambda net, x: net.second(net.first(Ordered.apply(x))),
    "of what code between layers makes": lambda net, x: net.first(Ordered.apply(x.sinh())),
    "of a layer's outputs": lambda net, x: net.second(Ordered.apply(net.first(x))),
    "in a module": lambda net, x: net.second(net.pool(x)),
    "of large constants in a module": lambda net, x: net.second(
        net.pool(x + 100 * torch.linspace(-1, 1, x.shape[1])[:, None])
    ),
    "of gradients": gradients_that_cancel,
}


def tokens_that_cancel(size, length=32):
    half = torch.randn(size, length // 2, 5)
    return torch.cat([half, -half * (1 + 1e-3 * torch.randn_like(half))], 1)


def network_of(function, mixing=0.0):
    def mixed(net, x):
        return function(net, x) * (1 + mixing * x.abs().mean())

    return zoo.Net(mixed, first=nn.Linear(5, 5), second=nn.Linear(5, 5), pool=pool())


@pytest.mark.parametrize("name", ROUNDED_BY_SIZE)
def test_nearly_cancelling_tokens_that_are_summed_in_another_order(name):
    x = tokens_that_cancel(8)
    for size in (2, 3, 8):
        model = private(network_of(ROUNDED_BY_SIZE[name]))
        assert len(model(x[:size])) == size


@pytest.mark.parametrize("mixing", [1e-2, 1e-3])
@pytest.mark.parametrize("name", ROUNDED_BY_SIZE)
def test_mixing_beside_nearly_cancelling_tokens_is_found(name, mixing):
    x = tokens_that_cancel(8)
    model = private(network_of(ROUNDED_BY_SIZE[name], mixing))
    with pytest.raises(ValueError, match="depends on the other samples"):
        model(x)


def test_layers_round_in_a_network_that_runs_on_one_sample_at_a_time():
    def in_parts(net, x):
        rows = in_order(net.first(x))
        return torch.cat([net.second(part) for part in rows.split(2)])

    half = 1000.0 * torch.randint(1, 9, (3, 16, 5))  # whole numbers have no errors of their own
    network = network_of(in_parts)
    network.first = nn.Linear(5, 5, bias=False)
    model = private(network)
    assert len(model(torch.cat([half, -half, torch.ones(3, 1, 5)], 1))) == 3
    assert [handle.name for handle in model.capture.handles] == [""]


def test_layers_round_where_a_backward_computes_them_again():
    def in_parts(net, x):
        rows = in_order(checkpoint(net.first, x, use_reentrant=False))
        return torch.cat([net.second(part) for part in rows.split(2)])

    half = 1e5 * torch.randn(3, 16, 5)
    block = network_of(in_parts)
    model = private(nn.Sequential(nn.Linear(5, 5), block))
    assert len(model(torch.cat([half, -half, torch.ones(3, 1, 5)], 1))) == 3
    assert [handle.name for handle in model.capture.handles] == ["0", "1"]
    assert not any(module._forward_hooks for module in block.children())


def with_mask(net, x, mask):
    """One number is added to all scores of a query, as where it sees nothing but padding."""
    queries = net.first(x)
    scores = (queries @ queries.mT + mask).softmax(-1)
    return net.second((scores @ net.first(x)).mean(1))


def with_weights(net, x, bias):
    return net.second((net.first(x) * bias.softmax(-1)[..., None]).sum(1))


def with_keys(net, x, keys):
    same = (keys[:, :, None] == keys[:, None, :]).float()
    return net.second((same @ net.first(x)).mean(1))


LOWEST = torch.finfo(torch.float32).min
EXACT = {  # functions that an error in one of two equal numbers would change
    "the lowest mask": (with_mask, torch.full((6, 6), LOWEST).repeat(8, 1, 1)),
    "a mask of -1e9": (with_mask, torch.full((6, 6), -1e9).repeat(8, 1, 1)),
    "weights of one number": (with_weights, torch.full((8, 6), -1e9)),
    "keys": (with_keys, torch.rand(8, 2, generator=torch.Generator().manual_seed(0)).repeat(1, 3)),
}


@pytest.mark.parametrize("mixing", [1e-3, 0.0])
@pytest.mark.parametrize("name", EXACT)
def test_equal_numbers_stay_equal_in_runs_with_errors(name, mixing):
    function, second = EXACT[name]

    def mixed(net, x, y):
        return function(net, x, y) * (1 + mixing * x.abs().mean())

    model = private(zoo.Net(mixed, first=nn.Linear(5, 5), second=nn.Linear(5, 3)))
    with (
        pytest.raises(ValueError, match="depends on the other samples") if mixing else nullcontext()
    ):
        model(torch.randn(8, 6, 5), second)
