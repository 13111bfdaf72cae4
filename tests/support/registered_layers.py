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
    a, gradient = tokens(x), tokens(gradient) * times
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


register_layer(Gate, gate_gradients)
register_layer(Dense, dense_gradients)
