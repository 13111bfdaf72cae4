"""`F.linear` as autograd functions: outputs, input gradients, and G of weight and bias."""

import pytest
import torch

from dp_clipping.layers.projection import Dense

B, T, P, D = 3, 4, 5, 6


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def operands():
    x, weight = numbers(T, B, P).requires_grad_(), numbers(D, P, seed=1)
    return x, weight, numbers(D, seed=2), numbers(T, B, D, seed=3)


def expected(x, weight, gy):
    return torch.einsum("tbd,tbp->bdp", gy, x.detach()), gy.sum(0), gy @ weight


@pytest.mark.parametrize("transposed", [False, True])
def test_dense(operands, transposed):
    """Samples are in dimension 1; a transposed parameter has a transposed G."""
    x, weight, bias, gy = operands
    shape = (B, P, D) if transposed else (B, D, P)
    slots = [numbers(*s).requires_grad_() for s in ((B, D), shape)]
    rest = (None, None, "dimension", 1, B, transposed)
    y = Dense.apply(x, weight, bias, slots[1], slots[0], rest)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))
    gx, g_bias, g = torch.autograd.grad(y, (x, *slots), gy)
    weights, biases, inputs = expected(x, weight, gy)
    torch.testing.assert_close(g.mT if transposed else g, weights)
    torch.testing.assert_close(g_bias, biases)
    torch.testing.assert_close(gx, inputs)


def test_float16_gradients_beyond_the_largest_number():
    x = torch.full((1, 2, 1), 300.0).half().requires_grad_()
    slot, weight = torch.zeros(1, 1, 1, requires_grad=True), torch.ones(1, 1).half()
    y = Dense.apply(x, weight, None, slot, None, (None, None, "dimension", 0, 1, False))
    (g,) = torch.autograd.grad(y, slot, torch.full_like(y, 300.0))
    assert g.item() == 2 * 300.0**2
