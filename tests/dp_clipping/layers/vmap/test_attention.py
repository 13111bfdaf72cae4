"""Attention under vmap is what it is for each sample alone, with a gradient for its mask."""

import pytest
import torch
import torch.nn.functional as F

from dp_clipping.layers.vmap.attention import BatchedAttention

B, T, E = 3, 5, 4


@pytest.mark.parametrize(
    ("query", "mask", "in_dims"),
    [
        ((B, 1, 2, T, E), (B, 1, 2, T, T), (0, 0, 0, 0)),
        ((B, 1, 2, T, E), (B, 1, 1, 1, T), (0, 0, 0, 0)),
        ((B, 6, 2, T, E), (B, 2, T, T), (0, 0, 0, 0)),  # windows
        ((B, 2, T, E), (B, T, T), (0, 0, 0, 0)),
        ((B, 2, T, E), (2, T, T), (0, 0, 0, None)),
        ((B, 2, T, E), None, (0, 0, 0, None)),
        ((2, B, T, E), None, (1, 1, 1, None)),
        ((B, T, E), (B, T, T), (0, 0, 0, 0)),
    ],
)
def test_it_is_that_of_each_sample(query, mask, in_dims):
    draw = torch.Generator().manual_seed(0)
    shapes = [query, query, query, *([] if mask is None else [mask])]
    inputs = [torch.randn(s, generator=draw).double().requires_grad_() for s in shapes]
    operands = [*inputs, None][:4]
    of_sample = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(operands, in_dims, strict=True)]
        for i in range(B)
    ]
    expected = torch.stack([F.scaled_dot_product_attention(*one) for one in of_sample])
    with BatchedAttention():
        found = torch.vmap(F.scaled_dot_product_attention, in_dims=in_dims)(*operands)
    torch.testing.assert_close(found, expected)
    if query[1:] != (T, E):  # two dimensions are left to torch
        gradient = torch.randn(expected.shape, generator=draw).double()
        gradients = (torch.autograd.grad(y, inputs, gradient) for y in (found, expected))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_outside_of_vmap_it_is_torch_s():
    x = torch.randn(2, 3, T, E)
    with BatchedAttention():
        found = F.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(x, x, x))
