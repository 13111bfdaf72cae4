"""Networks of random layers, used in random ways, beside one ordinary backward a sample.

What a layer does alone is in `ops`, and what networks of the zoo do in `test_contract`. Here layers
meet each other: reused, tied, in parts of the batch, computed again, with others between them.
"""

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import MODES, clipped_sums, private
from tests.support import zoo

WORDS = 11


def of(run: Callable, **parts: Callable[[int, int], nn.Module | nn.Parameter]) -> Callable:
    """Returns what makes a module of [B, T, D], whose parts are made for D and T."""
    return lambda d, t: zoo.Net(run, **{name: make(d, t) for name, make in parts.items()})


def numbers(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def linear(d: int, t: int) -> nn.Module:
    return nn.Linear(d, d)


def in_channels(layer: Callable[[int], nn.Module]) -> Callable:
    return of(lambda net, x: net.layer(x.mT).mT, layer=lambda d, t: layer(d))


def halves(net: nn.Module, x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([net.layer(one), other * net.layer(other)], -1)


def every_second(net: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::2], y[:, 1::2] = net.layer(x[:, ::2]), net.other(x[:, 1::2])
    return y


def cells(net: nn.Module, x: Tensor) -> Tensor:
    h, found = None, []
    for token in x.unbind(1):
        h = net.layer(token, h)
        found.append(h)
    return torch.stack(found, 1)


def in_place(net: nn.Module, x: Tensor) -> Tensor:
    y = net.layer(x)
    y.mul_(0.5)
    y += x
    return F.relu_(y)


def picked(net: nn.Module, x: Tensor) -> Tensor:
    place = x.detach().sum(-1).argmax(1)
    return x + net.layer(x[torch.arange(len(x)), place])[:, None]


LAYERS = {
    "linear": linear,
    "norm": lambda d, t: nn.LayerNorm(d),
    "rms norm": lambda d, t: nn.RMSNorm(d),
    "group norm": in_channels(lambda d: nn.GroupNorm(2, d)),
    "convolution": in_channels(lambda d: nn.Conv1d(d, d, 3, padding=2, groups=2, dilation=2)),
    "prelu": in_channels(nn.PReLU),
    "over tokens": of(lambda net, x: net.layer(x.mT).mT, layer=lambda d, t: nn.Linear(t, t)),
    "attention": of(
        lambda net, x: net.layer(x, x, x, need_weights=False)[0],
        layer=lambda d, t: nn.MultiheadAttention(d, 2, batch_first=True),
    ),
    "encoder": lambda d, t: nn.TransformerEncoderLayer(d, 2, 2 * d, 0.0, batch_first=True),
    "lstm": of(
        lambda net, x: net.layer(x)[0], layer=lambda d, t: nn.LSTM(d, d, batch_first=True)
    ),
    "cells": of(cells, layer=lambda d, t: nn.GRUCell(d, d)),
    "scale": of(
        lambda net, x: x * net.scale + net.shift,
        scale=lambda d, t: numbers(d), shift=lambda d, t: numbers(d),
    ),
    "matrix": of(
        lambda net, x: net.layer(x).tanh() * net.factor + x @ net.matrix,
        layer=linear, factor=lambda d, t: numbers(),
        matrix=lambda d, t: nn.Parameter(nn.Linear(d, d).weight.detach()),
    ),
    "token": of(
        lambda net, x: torch.cat([net.token.expand(len(x), 1, -1), x[:, :-1]], 1),
        token=lambda d, t: numbers(1, 1, d),
    ),
    "positions": of(
        lambda net, x: x + net.layer(torch.arange(x.shape[1], device=x.device)),
        layer=lambda d, t: nn.Embedding(t, d),
    ),
    "time major": of(
        lambda net, x: net.norm(net.layer(x.transpose(0, 1))).transpose(0, 1),
        layer=linear, norm=lambda d, t: nn.LayerNorm(d),
    ),
    "halves": of(halves, layer=lambda d, t: nn.Linear(d // 2, d // 2)),
    "every second": of(every_second, layer=linear, other=linear),
    "in place": of(in_place, layer=linear),
    "picked": of(picked, layer=linear),
    "weight norm": lambda d, t: nn.utils.parametrizations.weight_norm(nn.Linear(d, d)),
}  # fmt: skip
USES = {
    "once": lambda layer, x: layer(x),
    "beside": lambda layer, x: x + layer(x),
    "twice": lambda layer, x: layer(x) * torch.sigmoid(layer(x.flip(1))),
    "again": lambda layer, x: layer(layer(x)),
    "computed again": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "in parts": lambda layer, x: torch.cat([layer(part) for part in x.split(2)]),
    "doubled": lambda layer, x: sum(layer(torch.cat([x, x.flip(1)])).tanh().chunk(2)),
    "cut off": lambda layer, x: layer(x.detach()) + x,
}


# Of norms, and of sums; activations with a kink have either slope where the number is rounded.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9), torch.float32: (2e-4, 2e-3), torch.bfloat16: (5e-2, 1e-1)
}  # fmt: skip


class Drawn(nn.Module):
    """A network of [B, T, D], or of ids [B, T], to [B, T, 3].

    Attributes:
        said: its layers and their uses.
    """

    def __init__(
        self, draw: random.Random, width: int, tokens: int, has_ids: bool, names: list[str]
    ):
        super().__init__()
        self.words = nn.Embedding(WORDS, width) if has_ids else nn.Identity()
        self.layers, self.uses, self.said = nn.ModuleList(), [], []
        for _ in range(draw.randint(1, 4)):
            name, use = draw.choice(names), draw.choice([*USES])
            layer = LAYERS[name](width, tokens)
            if self.layers and draw.random() < 0.2:
                name, layer = self.said[0].partition(": ")[0], self.layers[0]
            if (name, use) == ("time major", "doubled"):  # is refused
                use = "once"
            self.layers.append(layer)
            self.uses.append(use)
            self.said.append(f"{name}: {use}")
        alike = [m for m in self.modules() if type(m) is nn.Linear and len(m.weight) == width]
        alike = [m for m in alike if m.in_features == width]
        if len(alike) > 1 and draw.random() < 0.25:
            alike[-1].weight = alike[0].weight
            self.said.append("tied")
        self.head = nn.Linear(width, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer, use in zip(self.layers, self.uses, strict=True):
            x = USES[use](layer, x)
        return self.head(x)


def check(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
    """Compares two steps, on batches of different sizes, with some samples clipped."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    names, modes, width, tokens = [*LAYERS], [*MODES], 4, draw.choice([3, 4, 5])
    if device == "cuda":
        modes += ["flash", "flash_bookkeeping"]
        width, tokens = draw.choice([32, 64, 128]), draw.choice([5, 33, 64, 130])
        names.remove("picked")  # the largest of numbers that are rounded may be another
    has_ids = draw.random() < 0.3
    network = Drawn(draw, width, tokens, has_ids, names).to(device, dtype)
    plain, mode, size = copy.deepcopy(network), draw.choice(modes), draw.choice([2, 3, 4, 5])
    print(seed, mode, f"[{size}, {tokens}, {width}]", *plain.said, sep=", ")
    is_used_before, model = draw.random() < 0.5, None
    for count in (size, draw.choice([1, size, size + 1, 2 * size])):
        x = torch.randn(count, tokens, width, dtype=torch.float64)
        y = torch.randn(count, tokens, 3, dtype=torch.float64)
        y[0] *= 30
        x = torch.randint(WORDS, (count, tokens)) if has_ids else x.to(dtype)
        batch = x.to(device), y.to(device)
        gradients = oracle.per_sample_gradients(plain, batch, zoo.product)
        if model is None:
            limit = oracle.norms(gradients).median().item()
            model = private(network, mode, max_grad_norm=limit)
        if is_used_before:  # what libraries keep of an ordinary step is there for the private one
            zoo.product(plain(batch[0]), batch[1]).sum().backward()
        compare(clipped_sums(model, batch), model, gradients, limit, TOLERANCES[dtype])


def compare(
    sums: dict[str, Tensor],
    model: nn.Module,
    gradients: oracle.Gradients,
    limit: float,
    tolerances: tuple[float, float],
) -> None:
    """Norms relative to the largest, sums to what they are at most."""
    norms = oracle.norms(gradients)
    error = (model.per_sample_gradient_norms.double() - norms).abs().max()
    assert error <= tolerances[0] * norms.max(), f"norms: {error / norms.max():.2g}"
    for name, expected in oracle.clipped_sum(gradients, limit).items():
        error = (sums[name].double() - expected).norm() / (len(norms) * limit)
        assert error <= tolerances[1], f"{name}: {error:.2g}"


@pytest.mark.parametrize(
    "first", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(10, 400, 10)]]
)
def test_a_step_is_that_of_one_sample_at_a_time(first):
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "first", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(20, 400, 20)]]
)
def test_on_a_gpu(first, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for seed in range(first, first + 20):
        check(seed, "cuda", dtype)
