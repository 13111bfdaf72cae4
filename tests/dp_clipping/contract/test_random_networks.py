"""Networks of random layers, used in random ways, beside one ordinary backward a sample.

What a layer does alone is in `ops`, and what networks of the zoo do in `test_contract`. Here layers
meet each other: reused, tied, in parts of the batch, computed again, with others between them.
"""

import copy
import random
from collections.abc import Callable
from functools import partial

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


TOKENS = {
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


def resized(net: nn.Module, x: Tensor) -> Tensor:
    return F.interpolate(net.layer(F.avg_pool2d(x, 2, ceil_mode=True)), x.shape[2:])


def gated(net: nn.Module, x: Tensor) -> Tensor:
    return x * net.layer(x.mean((2, 3), keepdim=True)).sigmoid()


def in_windows(net: nn.Module, x: Tensor) -> Tensor:
    """Patches of 2 x 2 as tokens of a layer; what is left over at an edge stays."""
    d, height, width = x.shape[1:]
    y = x.clone()
    inner = x[:, :, : height // 2 * 2, : width // 2 * 2]
    patches = inner.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 4, 5, 1)
    patches = net.layer(patches.flatten(3)).unflatten(-1, (2, 2, d)).permute(0, 5, 1, 3, 2, 4)
    y[:, :, : inner.shape[2], : inner.shape[3]] = patches.reshape(inner.shape)
    return y


def rows(net: nn.Module, x: Tensor) -> Tensor:
    count, d, height, width = x.shape
    y = net.layer(x.transpose(1, 2).reshape(count * height, d, width))
    return y.unflatten(0, (count, height)).transpose(1, 2)


def evaluated(d: int, t: int) -> nn.Module:
    """Normalises with fixed statistics, also in training."""
    layer = nn.BatchNorm2d(d).eval()
    layer.train = lambda mode=True: layer
    return layer


def convolution(d: int, t: int, **options) -> nn.Module:
    return nn.Conv2d(d, d, **{"kernel_size": 3, "padding": 1} | options)


IMAGES = {
    "convolution": convolution,
    "of channels": lambda d, t: convolution(d, t, groups=d, bias=False),
    "in groups": lambda d, t: convolution(d, t, groups=2, kernel_size=(3, 1), padding=(1, 0)),
    "pointwise": lambda d, t: convolution(d, t, kernel_size=1, padding=0),
    "dilated": lambda d, t: convolution(d, t, dilation=2, padding="same"),
    "reflected": lambda d, t: convolution(d, t, padding_mode="reflect"),
    "circular": lambda d, t: convolution(
        d, t, padding_mode="circular", kernel_size=(1, 3), padding=(0, 1)
    ),
    "larger": lambda d, t: convolution(d, t, kernel_size=5, padding=2),
    "down and up": of(
        lambda net, x: net.up(F.relu(net.down(x)), output_size=x.shape[2:]),
        down=lambda d, t: nn.Conv2d(d, 2 * d, 3, 2, 1),
        up=lambda d, t: nn.ConvTranspose2d(2 * d, d, 3, 2, 1),
    ),
    "transposed": lambda d, t: nn.ConvTranspose2d(d, d, 3, padding=1, groups=2),
    "group norm": lambda d, t: nn.GroupNorm(2, d),
    "instance norm": lambda d, t: nn.InstanceNorm2d(d, affine=True),
    "fixed norm": evaluated,
    "channels last": of(
        lambda net, x: net.norm(net.layer(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
        layer=linear, norm=lambda d, t: nn.LayerNorm(d),
    ),
    "memory format": of(
        lambda net, x: net.layer(x.contiguous(memory_format=torch.channels_last)),
        layer=convolution,
    ),
    "prelu": lambda d, t: nn.PReLU(d),
    "resized": of(resized, layer=convolution),
    "gated": of(gated, layer=lambda d, t: convolution(d, t, kernel_size=1, padding=0)),
    "windows": of(in_windows, layer=lambda d, t: nn.Linear(4 * d, 4 * d)),
    "rows": of(rows, layer=lambda d, t: nn.Conv1d(d, d, 3, padding=1)),
    "scale": of(
        lambda net, x: x * net.scale[:, None, None] + x, scale=lambda d, t: numbers(d),
    ),
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
    """A network of tokens [B, T, D], of ids [B, T], or of images [B, D, T, T], to [B, .., 3].

    Attributes:
        said: its layers and their uses.
    """

    def __init__(self, draw: random.Random, kind: str, width: int, tokens: int, names: list[str]):
        super().__init__()
        self.words = nn.Embedding(WORDS, width) if kind == "ids" else nn.Identity()
        self.layers, self.uses, self.said = nn.ModuleList(), [], []
        for _ in range(draw.randint(1, 4)):
            name, use = draw.choice(names), draw.choice([*USES])
            layer = (IMAGES if kind == "images" else TOKENS)[name](width, tokens)
            if self.layers and draw.random() < 0.2:
                name, layer = self.said[0].partition(": ")[0], self.layers[0]
            if name in ("time major", "rows") and use == "doubled":  # is refused
                use = "once"
            self.layers.append(layer)
            self.uses.append(use)
            self.said.append(f"{name}: {use}")
        self.head = nn.Linear(width, 3)
        weighted = [m for m in self.modules() if type(m) in (nn.Linear, nn.Conv2d)]
        one = draw.choice(weighted)
        alike = [m for m in weighted if m is not one and m.weight.shape == one.weight.shape]
        if alike and draw.random() < 0.4:
            alike[0].weight = one.weight
            self.said.append("tied")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer, use in zip(self.layers, self.uses, strict=True):
            x = USES[use](layer, x)
        return self.head(x if x.dim() == 3 else x.flatten(2).mT)


def check(
    seed: int, device: str = "cpu", dtype: torch.dtype = torch.float64, in_16_bit: bool = False
) -> None:
    """Compares two steps, on batches of different sizes, with some samples clipped.

    Args:
        in_16_bit: by autocast.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind, modes = draw.choice(["tokens", "ids", "images", "images"]), [*MODES]
    names, width, tokens = [*(IMAGES if kind == "images" else TOKENS)], 4, draw.choice([3, 4, 5])
    if device == "cpu":
        # PyTorch's backward of one sample is wrong where its gradient is in channels_last.
        names = [name for name in names if name != "instance norm"]
    if device == "cuda":
        modes += ["flash", "flash_bookkeeping"]
        width, tokens = draw.choice([32, 64, 128]), draw.choice([5, 33, 64, 130])
        # The largest of numbers that are rounded may be another one.
        names = [name for name in names if name != "picked"]
    if kind == "images":
        tokens = min(tokens, 33)
    network = Drawn(draw, kind, width, tokens, names).to(device, dtype)
    plain, mode, size = copy.deepcopy(network), draw.choice(modes), draw.choice([2, 3, 4, 5])
    print(seed, mode, kind, f"[{size}, {tokens}, {width}]", *plain.said, sep=", ")
    is_used_before, model = draw.random() < 0.5, None
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=in_16_bit)
    tolerances = TOLERANCES[torch.bfloat16 if in_16_bit else dtype]
    shape = {"tokens": (tokens, width), "ids": (tokens,), "images": (width, tokens, tokens)}[kind]
    for count in (size, draw.choice([1, size, size + 1, 2 * size])):
        x = torch.randn(count, *shape, dtype=torch.float64)
        x = torch.randint(WORDS, x.shape) if kind == "ids" else x.to(dtype)
        places = tokens**2 if kind == "images" else tokens
        y = torch.randn(count, places, 3, dtype=torch.float64)
        y[0] *= 30
        batch = x.to(device), y.to(device)
        gradients = oracle.per_sample_gradients(plain, batch, zoo.product)
        if model is None:
            limit = oracle.norms(gradients).median().item()
            model = private(network, mode, max_grad_norm=limit)
        with autocast():
            if is_used_before:  # what libraries keep of an ordinary step is there for a private one
                zoo.product(plain(batch[0]), batch[1]).sum().backward()
            ordinary = oracle.per_sample_gradients(plain, batch, zoo.product, dtype)
            sums = clipped_sums(model, batch)
        compare(sums, model, gradients, ordinary, limit, tolerances)


def compare(
    sums: dict[str, Tensor],
    model: nn.Module,
    gradients: oracle.Gradients,
    ordinary: oracle.Gradients,
    limit: float,
    tolerances: tuple[float, float],
) -> None:
    """Norms relative to the largest, sums to what they are at most.

    Args:
        ordinary: the gradients in the dtype of the network; errors may be some times theirs.
    """

    def errors(norms: Tensor, sums: dict[str, Tensor]) -> dict[str, float]:
        found = {"norms": float((norms.double() - wanted).abs().max() / wanted.max())}
        for name, expected in oracle.clipped_sum(gradients, limit).items():
            found[name] = float((sums[name].double() - expected).norm() / (len(wanted) * limit))
        return found

    wanted, of_ordinary = oracle.norms(gradients), {n: g.double() for n, g in ordinary.items()}
    rounding = errors(oracle.norms(of_ordinary), oracle.clipped_sum(of_ordinary, limit))
    for name, error in errors(model.per_sample_gradient_norms, sums).items():
        room = tolerances[name != "norms"] + 3 * rounding[name]
        assert error <= room, f"{name}: {error:.2g}, and an ordinary step's {rounding[name]:.2g}"


@pytest.mark.parametrize(
    "first", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(10, 400, 10)]]
)
def test_a_step_is_that_of_one_sample_at_a_time(first):
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(
    "first", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(20, 400, 20)]]
)
def test_on_a_gpu(first, how, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    for seed in range(first, first + 20):
        check(seed, "cuda", dtype, in_16_bit=how == "autocast")
