"""Inputs built to come out larger than C: long sums, tokens that cancel, shared memory."""

import pytest
import torch
from torch import nn

from dp_clipping.clipping.accumulation import squared_norms
from tests.dp_clipping.conftest import MODES, private, private_loss, unchecked
from tests.support import zoo

every_mode = pytest.mark.parametrize("mode", MODES)
LIMIT = 1 + 1e-6


def contribution(model: nn.Module, inputs, targets) -> float:
    """Norm of what one batch of one leaves in `.grad`, in float64."""
    private_loss(model, (inputs, targets), zoo.product).backward()
    return sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()


@pytest.mark.parametrize("kind", ["random", "positive", "constant"])
def test_norms_of_many_numbers(kind):
    """One chain of float32 sums loses up to some percent."""
    numbers = {
        "random": lambda: torch.randn(1, 12_345_678),
        "positive": lambda: torch.rand(1, 12_345_678),
        "constant": lambda: torch.full((1, 12_345_678), 0.3),
    }[kind]()
    exact = numbers.double().square().sum(1)
    torch.testing.assert_close(squared_norms(numbers).double(), exact, rtol=4e-6, atol=0)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "base", "epsilon"), [(4096, 1.26461, 3e-3), (512, 1.3, 1e-3)])
def test_constant_tokens_that_cancel(mode, dtype, width, base, epsilon):
    """Every product rounds the same way, so errors of Gram matrices grow with the width."""
    tokens = torch.stack((torch.full((width,), base), torch.full((width,), base * (1 + epsilon))))
    targets = torch.randn(64).expand(2, 64) * torch.tensor([[1.0], [-1.0]])
    model = unchecked(nn.Linear(width, 64, bias=False).to(dtype), mode)
    assert contribution(model, tokens[None].to(dtype), targets[None]) <= LIMIT


@every_mode
@pytest.mark.parametrize("length", [256, 2048])
def test_one_token_repeated_that_cancels(mode, length):
    """The order and the scale in which equal tokens are added changes what is left."""
    targets = torch.randn(8).repeat(length, 1)
    targets[length // 2 :] *= -2
    targets[3 * length // 4 :] = 0
    model = private(nn.Embedding(5, 8), mode, max_grad_norm=1e-4)
    ids = torch.full((1, length), 3)
    assert contribution(model, ids, targets[None]) <= 1e-4 * LIMIT


@every_mode
def test_many_tokens_of_one_sign_then_the_other(mode):
    """Partial sums are large where the whole is small."""
    length = 512
    tokens = torch.ones(length, 96)
    targets = torch.cat((torch.full((256, 64), 0.7), torch.full((256, 64), -0.7 * (1 + 1e-5))))
    model = private(nn.Linear(96, 64, bias=False), mode, max_grad_norm=1e-3)
    assert contribution(model, tokens[None], targets[None]) <= 1e-3 * LIMIT


@every_mode
@pytest.mark.parametrize("shape", [(1, 16), (1, 5, 16)])
def test_backward_within_autocast(mode, shape):
    """Autograd would run what forms norms and sums in 16 bit too."""
    for seed in range(8):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        model = unchecked(net, mode, max_grad_norm=1e-2)
        inputs, targets = torch.randn(shape), torch.randn(*shape[:-1], 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert contribution(model, inputs, targets) <= 1e-2 * LIMIT


def test_an_output_gradient_that_a_kept_gradient_is_part_of():
    """Scaling the one in place must not scale the other."""
    sums = {}
    for mode in ("per_sample", "bookkeeping"):
        net = zoo.seeded(lambda: zoo.Net(
            lambda own, x: own.last(own.first(x) + own.position), first=nn.Linear(64, 24),
            position=nn.Parameter(torch.randn(5, 24)), last=nn.Linear(24, 24),
        )).to(torch.bfloat16)  # fmt: skip
        model = unchecked(net, mode, max_grad_norm=0.01)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(2, 5, 64, generator=generator).to(torch.bfloat16)
        targets = torch.randn(2, 5, 24, generator=generator)
        private_loss(model, (inputs, targets), zoo.product).backward()
        sums[mode] = net.position.grad
    torch.testing.assert_close(sums["bookkeeping"], sums["per_sample"], rtol=0.02, atol=1e-5)


@every_mode
def test_an_output_gradient_without_memory_of_its_own(mode):
    """The gradient of a sum is one number, expanded."""
    model = unchecked(nn.Linear(64, 48).to(torch.bfloat16), mode, max_grad_norm=0.1)

    def total(outputs, targets):
        return outputs.flatten(1).sum(1)

    private_loss(model, (torch.randn(2, 5, 64).bfloat16(), torch.zeros(2)), total).backward()
    norm = model.network.weight.grad.double().norm()
    assert 0.05 < norm <= 0.2


@pytest.mark.parametrize(
    ("seed", "scale", "epsilon", "factor"),
    [(23, 10, 2**-4, 3.548e-7), (46, 1, 2**-6, 7.943e-7), (79, 1, 2**-4, 3.548e-7)],
)
def test_tokens_that_cancel_among_subnormal_numbers(seed, scale, epsilon, factor):
    """Halving what exceeds C rounds it again in float16, up to 1.8 C: so it is normed again."""
    draw = torch.Generator().manual_seed(seed)
    half = torch.randn(1, 1, 40, generator=draw)
    x = (torch.randn(1, 1, 40, generator=draw) * scale).expand(1, 2, 40).half()
    y = torch.cat([half, -half * (1 + epsilon)], dim=1).half()
    limit = factor * float((y[0].double().T @ x[0].double()).norm())
    net = nn.Linear(40, 40, bias=False).half()
    nn.init.zeros_(net.weight)
    assert contribution(unchecked(net, "bookkeeping", limit), x, y) <= limit * LIMIT
