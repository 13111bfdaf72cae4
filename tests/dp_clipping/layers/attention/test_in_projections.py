"""Parts of one weight that project other inputs: G has the rows of each, and autograd agrees."""

import torch
import torch.nn.functional as F

from dp_clipping.layers.attention.in_projections import AddBiases, InProjections, RepeatToken
from dp_clipping.layers.batch_layout import Layout

B, P = 3, 4
FIRST, SECOND = Layout("dimension", 0), Layout("dimension", 1)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_parts_of_a_weight():
    weight, bias, slot = numbers(5, P), numbers(5), numbers()
    xs, sizes, found = [numbers(B, 2, P), numbers(6, B, P)], [2, 3], {}
    takes = (lambda a, y: found.update(g=y.mT @ a), lambda y: found.update(b=y.sum(1)))
    ys = InProjections.apply(
        weight.detach(), bias.detach(), slot, slot, takes, sizes, (FIRST, SECOND), B, *xs
    )
    pairs = zip(xs, weight.split(sizes), bias.split(sizes), strict=True)
    expected = [F.linear(*one) for one in pairs]
    gys = [torch.randn_like(y) for y in ys]
    inputs = torch.autograd.grad(ys, xs, gys)
    wanted = torch.autograd.grad(expected, xs, gys, retain_graph=True)
    for pair in zip((*ys, *inputs), (*expected, *wanted), strict=True):
        torch.testing.assert_close(*pair)
    for i in range(B):
        losses = [(expected[0][i] * gys[0][i]).sum(), (expected[1][:, i] * gys[1][:, i]).sum()]
        of_weight, of_bias = torch.autograd.grad(sum(losses), (weight, bias), retain_graph=True)
        torch.testing.assert_close(found["g"][i], of_weight)
        torch.testing.assert_close(found["b"][i], of_bias)


def test_parts_of_a_bias():
    bias, slot, found = torch.arange(6.0).double(), numbers(), []
    xs = [numbers(B, 2, 3), numbers(5, B, 3)]
    ys = AddBiases.apply(bias, slot, found.append, (FIRST, SECOND), B, *xs)
    torch.testing.assert_close(ys[1], xs[1] + bias[3:])
    gys = [torch.randn_like(y) for y in ys]
    inputs = torch.autograd.grad(ys, xs, gys)
    assert all(map(torch.equal, inputs, gys))
    torch.testing.assert_close(found[0], torch.cat([gys[0].sum(1), gys[1].sum(0)], 1))


def test_a_token_for_each_sequence():
    """Two sequences of each sample, side by side."""
    token, slot, found = torch.randn(1, 1, P).double(), numbers(), []
    y = RepeatToken.apply(token, slot, found.append, Layout("sample_major"), B, 2 * B)
    assert torch.equal(y, token.expand(1, 2 * B, P))
    gy = torch.randn_like(y)
    torch.autograd.grad(y, slot, gy, allow_unused=True)
    torch.testing.assert_close(found[0], gy.view(B, 1, 2, P).sum(2, keepdim=True)[:, :, 0][:, None])
