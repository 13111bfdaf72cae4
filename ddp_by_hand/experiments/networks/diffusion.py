"""Networks of diffusion models: a UNet (Ho et al., 2020) and a transformer (Peebles and Xie, 2023).

Both predict the noise in images [B, C, H, W] at times [B] in [0, 1].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_by_hand.experiments.networks.models import Attention, group_norm


class TimedBlock(nn.Module):
    """A residual block [B, C, H, W] to which an embedding of the time [B, E] is added."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = group_norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.norm2 = group_norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(out)))


class PixelAttention(nn.Module):
    """Self-attention of all pixels [B, C, H, W], added to them."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.attention = group_norm(width), Attention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(pixels).transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """Three resolutions, attention at the lower two, and GroupNorm."""

    def __init__(self, width: int = 128, channels: int = 3) -> None:
        super().__init__()
        self.width = width
        embedding, deep = 4 * width, 2 * width
        self.embed = nn.Sequential(
            nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding), nn.SiLU()
        )
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down1 = TimedBlock(width, width, embedding)
        self.half1 = nn.Conv2d(width, width, 3, 2, padding=1)
        self.down2 = TimedBlock(width, deep, embedding)
        self.attend2 = PixelAttention(deep)
        self.half2 = nn.Conv2d(deep, deep, 3, 2, padding=1)
        self.middle1 = TimedBlock(deep, deep, embedding)
        self.attend3 = PixelAttention(deep)
        self.middle2 = TimedBlock(deep, deep, embedding)
        self.double2 = nn.ConvTranspose2d(deep, deep, 4, 2, padding=1)
        self.up2 = TimedBlock(2 * deep, deep, embedding)
        self.double1 = nn.ConvTranspose2d(deep, width, 4, 2, padding=1)
        self.up1 = TimedBlock(2 * width, width, embedding)
        self.norm, self.out = group_norm(width), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        time = self.embed(sinusoids(times, self.width))
        fine = self.down1(self.stem(images), time)
        coarse = self.attend2(self.down2(self.half1(fine), time))
        x = self.attend3(self.middle1(self.half2(coarse), time))
        x = self.double2(self.middle2(x, time))
        x = self.double1(self.up2(torch.cat([x, coarse], 1), time))
        return self.out(F.silu(self.norm(self.up1(torch.cat([x, fine], 1), time))))


class ModulatedBlock(nn.Module):
    """A transformer block [B, T, W] whose scales, shifts and gates follow from the time [B, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)  # at first a block adds nothing
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A transformer over patches of 2 × 2 pixels of images of `size` × `size`."""

    def __init__(
        self, width: int = 64, channels: int = 3, size: int = 16, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.width, self.side = width, size // 2
        self.embed = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.stem = nn.Conv2d(channels, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(self.side**2, width))
        self.blocks = nn.ModuleList(ModulatedBlock(width, heads) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 4 * channels)
        nn.init.zeros_(self.out.weight)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        time = self.embed(sinusoids(times, self.width))
        x = self.stem(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, time)
        patches = self.out(self.norm(x)).transpose(1, 2).unflatten(2, (self.side, self.side))
        return F.pixel_shuffle(patches, 2)


def sinusoids(times: Tensor, width: int) -> Tensor:
    """Returns sines and cosines [B, width] of times [B] at frequencies from 1000 to 0.1."""
    steps = torch.arange(width // 2, device=times.device, dtype=times.dtype)
    angles = 1000 * times[:, None] * torch.exp(steps * (-math.log(1e4) / (width // 2)))
    return torch.cat([angles.sin(), angles.cos()], dim=1)
