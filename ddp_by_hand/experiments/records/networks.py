"""The networks of the rows, by name: what each reads, and how it is made."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_by_hand.experiments.networks.models import PreActivationBlock, group_norm
from ddp_by_hand.experiments.records.synthetic import pretrain
from ddp_by_hand.experiments.records.texts import Language, pretrain_text, with_lora

CLASSES = 10


class TemperedSigmoid(nn.Module):
    """s · σ(T · x) − o, bounded in place of ReLU (Papernot et al. 2021).

    The default is tanh, the best of the paper's on three data sets.
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset


def linear(channels: int, side: int) -> nn.Module:
    """Returns a linear layer of zeros: the best guess before anything is known."""
    layer = nn.Linear(channels * side**2, CLASSES)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def scatter_cnn(channels: int, side: int) -> nn.Module:
    """Returns a CNN on scattering features, in the manner of Tramèr and Boneh (2021)."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, 2, padding=1), nn.Tanh(),
        nn.Conv2d(16, 32, 3, 1, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(32 * (-(-side // 2)) ** 2, 32), nn.Tanh(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def tempered_cnn(channels: int, side: int) -> nn.Module:
    """Returns the CNN of Papernot et al. for MNIST, with tempered sigmoids: 26,010 parameters."""
    convolutions = nn.Sequential(
        nn.Conv2d(channels, 16, 8, 2, padding=3), TemperedSigmoid(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), TemperedSigmoid(), nn.MaxPool2d(2, 1), nn.Flatten(),
    )  # fmt: skip
    features = convolutions(torch.zeros(1, channels, side, side)).shape[1]
    return nn.Sequential(
        *convolutions, nn.Linear(features, 32), TemperedSigmoid(), nn.Linear(32, CLASSES)
    )


def group_norm_cnn(channels: int, side: int) -> nn.Module:
    """Returns three convolutions with GroupNorm and ReLU, each at half the side of the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), group_norm(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (side // 8) ** 2, CLASSES))


def wide_resnet(channels: int, side: int, width: int = 32) -> nn.Module:
    """Returns a WideResNet-10 with GroupNorm, as of De et al., of images of any channels."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
    layers += [
        PreActivationBlock(width << max(0, stage - 1), width << stage, 1 + (stage > 0))
        for stage in range(3)
    ]
    last = 4 * width
    pooled = [group_norm(last), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *pooled, nn.Linear(last, CLASSES))


class Network(NamedTuple):
    """A network, how it is pretrained, and what is done to it then.

    Attributes:
        made: returns it; takes channels and side of images, or the length of sequences.
        features: what it reads: `pixels`, `scatter` or `text`.
        pretrain: trains it for so many steps on what is not private.
        adapt: what is done to it before private training.
    """

    made: Callable[..., nn.Module]
    features: str
    pretrain: Callable[[Any, int], None] = pretrain
    adapt: Callable[[nn.Module], nn.Module] = nn.Module.train


NETWORKS = {
    "scatter_linear": Network(linear, "scatter"),
    "scatter_cnn": Network(scatter_cnn, "scatter"),
    "tempered_cnn": Network(tempered_cnn, "pixels"),
    "group_norm_cnn": Network(group_norm_cnn, "pixels"),
    "wide_resnet": Network(wide_resnet, "pixels"),
    "transformer": Network(Language, "text", pretrain_text),
    "transformer_lora": Network(Language, "text", pretrain_text, with_lora),
}
