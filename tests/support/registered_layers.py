"""Layers of a user's own, registered with `register_layer`."""

import torch
from torch import Tensor, nn

from dp_clipping import LinearProduct, register_layer


class Gate(nn.Module):
    """y = tanh(x Wᵀ + b) · s, whose weight's gradients are a product."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        return (x @ self.weight.t() + self.bias).tanh() * self.scale * times


def tokens(x: Tensor) -> Tensor:
    """Returns [B, ..., features] as [B, T, features]."""
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)


def gate_gradients(layer: Gate, gradient: Tensor, x: Tensor, times: float = 1.0) -> dict:
    """Returns the bias's and the scale's G, and the weight's as a product."""
    a, gradient = tokens(x).to(layer.weight.dtype), tokens(gradient) * times
    u = (a @ layer.weight.t() + layer.bias).tanh()
    y = (gradient * layer.scale * (1 - u * u)).to(a.dtype)
    return {
        "weight": LinearProduct(a, y), "bias": y.sum(1), "scale": (gradient * u).sum(1),
    }  # fmt: skip


class Dense(Gate):
    """The same, whose function returns G of the weight."""


def dense_gradients(layer: Dense, gradient: Tensor, x: Tensor, times: float = 1.0) -> dict:
    found = gate_gradients(layer, gradient, x, times)
    product = found["weight"]
    return found | {"weight": product.gradients.mT @ product.activations}


class Apart(Gate):
    """The same, with a function for norms and one for sums."""


def gate_norms(layer: Apart, gradient: Tensor, x: Tensor, times: float = 1.0) -> dict:
    """Returns norms [B]; the weight's by Gram matrices of its two factors."""
    found = gate_gradients(layer, gradient, x, times)
    a, y = (t.double() for t in (found["weight"].activations, found["weight"].gradients))
    squared = ((a @ a.mT) * (y @ y.mT)).sum((1, 2))
    return {
        "weight": squared.clamp(min=0).sqrt(), "bias": y.sum(1).norm(dim=1),
        "scale": found["scale"].double().norm(dim=1),
    }  # fmt: skip


def gate_sums(layer: Apart, gradient: Tensor, c: Tensor, x: Tensor, times: float = 1.0) -> dict:
    """Returns Σ_i c_i G_i, of the weight by one product."""
    found = gate_gradients(layer, gradient, x, times)
    a, y = (t.float() if t.dtype.itemsize < 4 else t for t in vars(found["weight"]).values())
    y = y * c.to(y.dtype)[:, None, None]
    return {
        "weight": y.flatten(0, 1).t() @ a.flatten(0, 1), "bias": y.sum((0, 1)),
        "scale": torch.einsum("b,bo->o", c.to(a.dtype), found["scale"].to(a.dtype)),
    }  # fmt: skip


register_layer(Apart, norm=gate_norms, weighted_sum=gate_sums)
register_layer(Gate, gate_gradients)
register_layer(Dense, dense_gradients)
