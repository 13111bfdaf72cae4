"""How a convolution's taps lie, and the reference implementation of its per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

NARROW = 16  # inputs times outputs of a group, up to which matrix units are left alone


@dataclass(frozen=True)
class Geometry:
    """How a convolution's taps lie, in three dimensions; those that a layer lacks have size 1.

    Attributes:
        taps: size of the kernel.
        stride, padding, dilation: as PyTorch's.
        groups: number of groups of channels.
    """

    taps: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]
    groups: int

    def is_narrow(self, inputs: int, outputs: int) -> bool:
        """Returns whether a group has so few channels, as in a depthwise convolution.

        Args:
            inputs, outputs: channels of all groups together.
        """
        return inputs * outputs <= NARROW * self.groups**2


def patches(x: Tensor, geometry: Geometry, positions: tuple[int, ...]) -> Tensor:
    """Returns the pixels that each tap meets: a view [N, C, *positions, *taps] of padded x.

    Args:
        x: [N, C, D, H, W].
        positions: output positions in each dimension.
    """
    x = F.pad(x, [p for p in reversed(geometry.padding) for _ in (0, 1)])
    for n, (taps, stride, dilation) in enumerate(
        zip(geometry.taps, geometry.stride, geometry.dilation, strict=True)
    ):
        x = x.unfold(2 + n, (taps - 1) * dilation + 1, stride)[..., ::dilation]
        x = x.narrow(2 + n, 0, positions[n])
    return x


def gradients_plain(x: Tensor, y: Tensor, geometry: Geometry, batch_size: int) -> Tensor:
    """Reference implementation: G [B, O, C / groups, taps], products in the operands' dtype.

    Args:
        x: [N, C, D, H, W], N a multiple of B: a sample's pictures are side by side.
        y: [N, O, *positions].
    """
    found = patches(x, geometry, y.shape[2:])
    right = rearrange(
        found,
        "(b t) (g c) z h w k i j -> (b g) (t z h w) (c k i j)",
        b=batch_size,
        g=geometry.groups,
    )
    left = rearrange(y, "(b t) (g o) z h w -> (b g) o (t z h w)", b=batch_size, g=geometry.groups)
    product = torch.bmm(left, right)
    return rearrange(product, "(b g) o (c k) -> b (g o) c k", b=batch_size, k=prod(geometry.taps))
