"""Norm layers as autograd functions: outputs, input gradients, and G of weight and bias."""

import pytest
import torch
import torch.nn.functional as F

from dp_clipping.layers.norm import COPIES, LayerNorm, RMSNorm

B, T, N, EPS = 3, 4, 6, 1e-3
KINDS = {"dimension 0": (("dimension", 0), (B, T, N)), "dimension 1": (("dimension", 1), (T, B, N))}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_first(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.movedim(dim, 0)


@pytest.mark.parametrize("place", KINDS)
@pytest.mark.parametrize("copy", [None, *COPIES])
def test_rms_norm(place, copy):
    where, shape = KINDS[place]
    x, weight, gy = numbers(*shape).requires_grad_(), numbers(N, seed=1), numbers(*shape, seed=2)
    slot = torch.zeros(B, N, dtype=torch.float64, requires_grad=True)
    if copy:  # which are computed in float32
        x = x.detach().float().requires_grad_()
        slot, weight, gy = slot.detach().float().requires_grad_(), weight.float(), gy.float()
    rest = (EPS, ("", [N], "", copy), None, None, None, *where, B)
    y = RMSNorm.apply(x, weight, None, slot, None, rest)
    weight = 1 + weight if copy == "gemma_rms_norm" else weight
    torch.testing.assert_close(y, F.rms_norm(x, [N], weight, EPS))
    gx, g = torch.autograd.grad(y, (x, slot), gy)
    expected = torch.autograd.grad(F.rms_norm(x, [N], weight, EPS), x, gy)[0]
    torch.testing.assert_close(gx, expected)
    per_token = batch_first(gy * F.rms_norm(x, [N], None, EPS), where[1])
    torch.testing.assert_close(g, per_token.sum(1).detach())


@pytest.mark.parametrize("place", KINDS)
def test_layer_norm(place):
    where, shape = KINDS[place]
    x, gy = numbers(*shape).requires_grad_(), numbers(*shape, seed=2)
    weight, bias = numbers(N, seed=1), numbers(N, seed=3)
    slots = [torch.zeros(B, N, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rest = (EPS, ("", [N], "", None), None, None, None, *where, B)
    y = LayerNorm.apply(x, weight, bias, *slots, rest)
    torch.testing.assert_close(y, F.layer_norm(x, [N], weight, bias, EPS))
    gx, g, g_bias = torch.autograd.grad(y, (x, *slots), gy)
    expected = torch.autograd.grad(F.layer_norm(x, [N], weight, bias, EPS), x, gy)[0]
    torch.testing.assert_close(gx, expected)
    per_token = batch_first(gy * F.layer_norm(x, [N], None, None, EPS), where[1])
    torch.testing.assert_close(g, per_token.sum(1).detach())
    torch.testing.assert_close(g_bias, batch_first(gy, where[1]).sum(1))
