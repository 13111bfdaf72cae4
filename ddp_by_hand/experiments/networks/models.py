"""Networks for images, videos, audio, text and tables, made of torch's own modules.

Shapes: B samples, C channels, H × W pixels, T positions. `width`: channels of the first stage.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


def group_norm(width: int) -> nn.GroupNorm:
    """Returns a GroupNorm of up to 32 groups of at least four channels."""
    return nn.GroupNorm(min(32, width // 4), width)


class PreActivationBlock(nn.Module):
    """GroupNorm, ReLU and a 3 × 3 convolution, twice, added to the input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = group_norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = group_norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        is_same = stride == 1 and inputs == outputs
        self.shortcut = None if is_same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(out)
        return kept + self.conv2(F.relu(self.norm2(self.conv1(out))))


class WideResNet(nn.Sequential):
    """WideResNet-`depth`-`factor` with GroupNorm (De et al., 2022): [B, 3, H, W]."""

    def __init__(self, depth: int, factor: int, classes: int = 10) -> None:
        widths = [16 * factor, 32 * factor, 64 * factor]
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
        inputs = 16
        for stage, width in enumerate(widths):
            for number in range((depth - 4) // 6):
                layers.append(PreActivationBlock(inputs, width, 1 + (stage > 0 and number == 0)))
                inputs = width
        layers += [group_norm(inputs), nn.ReLU(), *_head(nn.AdaptiveAvgPool2d(1))]
        super().__init__(*layers, nn.Linear(inputs, classes))


class BasicBlock(nn.Module):
    """A residual block of ResNet-18 whose ReLUs work in place; 2-D, or 3-D for videos."""

    def __init__(self, conv: type[nn.Module], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = group_norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = group_norm(outputs)
        self.shortcut = None
        if stride > 1 or inputs != outputs:
            projection = conv(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, group_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class ResNet18(nn.Sequential):
    """ResNet-18 with GroupNorm: [B, 3, H, W]."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        stem = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), group_norm(width),
            nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1),
        ]  # fmt: skip
        layers = _stages(nn.Conv2d, width, per_stage=2)
        super().__init__(
            *stem, *layers, *_head(nn.AdaptiveAvgPool2d(1)), nn.Linear(8 * width, classes)
        )


class VideoResNet(nn.Sequential):
    """R3D-18, 3-D convolutions, with GroupNorm: [B, 3, frames, H, W]."""

    def __init__(self, width: int = 64, classes: int = 400, per_stage: int = 2) -> None:
        stem = [
            nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), padding=(1, 3, 3), bias=False),
            group_norm(width), nn.ReLU(inplace=True),
        ]  # fmt: skip
        layers = _stages(nn.Conv3d, width, per_stage)
        super().__init__(
            *stem, *layers, *_head(nn.AdaptiveAvgPool3d(1)), nn.Linear(8 * width, classes)
        )


def _stages(conv: type[nn.Module], width: int, per_stage: int) -> list[nn.Module]:
    """Returns four stages of basic blocks; stages 2 to 4 halve the side and double the width."""
    layers: list[nn.Module] = []
    inputs = width
    for stage in range(4):
        outputs = width << stage
        for number in range(per_stage):
            layers.append(BasicBlock(conv, inputs, outputs, 1 + (stage > 0 and number == 0)))
            inputs = outputs
    return layers


def _head(pool: nn.Module) -> list[nn.Module]:
    return [pool, nn.Flatten()]


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ConvNeXtBlock(nn.Module):
    """A depthwise 7 × 7 convolution and an MLP over channels, scaled by a parameter [C, 1, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).movedim(1, -1))
        out = self.project(F.gelu(self.expand(out))).movedim(-1, 1)
        return x + self.layer_scale * out


class ConvNeXt(nn.Sequential):
    """ConvNeXt-T without stochastic depth: [B, 3, H, W]."""

    def __init__(
        self, width: int = 96, depths: tuple[int, ...] = (3, 3, 9, 3), classes: int = 1000
    ) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width)]
        for stage, depth in enumerate(depths):
            if stage:
                layers += [ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, 2)]
                width *= 2
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        head = _head(nn.AdaptiveAvgPool2d(1))
        super().__init__(*layers, *head, nn.LayerNorm(width), nn.Linear(width, classes))


class MobileNet(nn.Sequential):
    """MobileNet v1, depthwise separable convolutions, with GroupNorm: [B, 3, H, W]."""

    def __init__(self, width: int = 32, classes: int = 1000, middle: int = 5) -> None:
        layers = [*self._unit(3, width, 3, 2)]
        inputs = width
        plan = [(2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * middle, (32, 2)]
        for factor, stride in plan:
            outputs = factor * width
            layers += self._unit(inputs, inputs, 3, stride, groups=inputs)
            layers += self._unit(inputs, outputs, 1)
            inputs = outputs
        super().__init__(*layers, *_head(nn.AdaptiveAvgPool2d(1)), nn.Linear(inputs, classes))

    @staticmethod
    def _unit(inputs: int, outputs: int, side: int, stride: int = 1, groups: int = 1) -> list:
        conv = nn.Conv2d(
            inputs, outputs, side, stride, padding=side // 2, groups=groups, bias=False
        )
        return [conv, group_norm(outputs), nn.ReLU6(inplace=True)]


class Attention(nn.Module):
    """Self-attention without a mask: [B, T, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """A pre-norm transformer block: [B, T, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class AudioEncoder(nn.Module):
    """wav2vec 2.0's shape: 1-D convolutions over a waveform [B, 1, T], then a transformer."""

    def __init__(
        self, channels: int = 512, width: int = 768, layers: int = 12, heads: int = 12,
        classes: int = 35,
    ) -> None:  # fmt: skip
        super().__init__()
        features: list[nn.Module] = [nn.Conv1d(1, channels, 10, 5, bias=False)]
        features += [nn.GroupNorm(channels, channels), nn.GELU()]
        for side in (3, 3, 3, 3, 2, 2):
            features += [nn.Conv1d(channels, channels, side, 2, bias=False), nn.GELU()]
        self.features = nn.Sequential(*features)
        self.norm, self.project = nn.LayerNorm(channels), nn.Linear(channels, width)
        self.positions = nn.Conv1d(width, width, 127, padding=63, groups=16)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, waveform: Tensor) -> Tensor:
        x = self.project(self.norm(self.features(waveform).transpose(1, 2)))
        x = x + F.gelu(self.positions(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


class LSTMClassifier(nn.Module):
    """An embedding, `nn.LSTM`, and a linear layer on the last state: `tokens` [B, T].

    With `lengths` [B] the sequences are packed.
    """

    def __init__(
        self, vocabulary: int = 20_000, width: int = 512, layers: int = 2, classes: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(x)[1][0][-1])


class TransformerClassifier(nn.Module):
    """An embedding, `nn.TransformerEncoder`, and a linear layer on the mean: `input_ids` [B, T]."""

    def __init__(
        self, vocabulary: int = 20_000, width: int = 512, layers: int = 6, classes: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64 or 1, 4 * width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids)).mean(1))


class TableNet(nn.Module):
    """An MLP on `numbers` [B, N] and the mean embeddings of `categories` [B, columns, bag]."""

    def __init__(
        self, numbers: int = 13, columns: int = 26, categories: int = 10_000, width: int = 32,
        hidden: int = 1024,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(categories, width, mode="mean") for _ in range(columns)
        )
        self.mlp = nn.Sequential(
            nn.Linear(numbers + columns * width, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, 2),
        )  # fmt: skip

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        bags = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.mlp(torch.cat([numbers, *bags], dim=1))
