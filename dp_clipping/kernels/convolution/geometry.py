"""Geometry of a convolution: where its operands lie once packed, and the reference implementation.

With the padding written out, and the pixels that are a stride apart side by side, the pixel that a
tap meets at a position is that position, moved by a number of pixels that depends on the tap only.
So a convolution is linear layers on views of x that are moved by so much (`runs_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NONE, ONE = (0, 0, 0), (1, 1, 1)
TILE = 128  # rows and columns of a program, of which most kernels have at least as many
NARROW = 16  # inputs times outputs of a group, up to which matrix units may be left alone
NARROW_VALUES = 256  # of G, up to which they are where there is one group


class Geometry(NamedTuple):
    """Sizes and strides of a convolution in three dimensions; missing dimensions are 1.

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


class Grid(NamedTuple):
    """The places of pixels in packed operands [.., phases, pictures, *sizes].

    A padded pixel at z of a dimension has the phase z % stride and the place z // stride in it. The
    output positions have places in the same sizes, behind which there are zeros.

    Attributes:
        phases: of each dimension, those that taps meet.
        sizes: places in each dimension.
    """

    phases: tuple[int, int, int]
    sizes: tuple[int, int, int]

    def rows(self, pictures: int, positions: tuple[int, ...]) -> int:
        """Returns how many places there are up to the last position of a sample's last picture."""
        if not pictures * prod(positions):
            return 0
        last = 0
        for size, count in zip(self.sizes, positions, strict=True):
            last = last * size + count - 1
        return (pictures - 1) * prod(self.sizes) + last + 1


class Target(NamedTuple):
    """How an operand [N, C, D, H, W] is packed: [N / pictures · groups, rows, width].

    Attributes:
        pictures: of a sample, side by side.
        groups: into which the channels are divided, each a sample of its own.
        width: of a row; behind a group's channels there are zeros.
        grid: where pixels lie, after padding, a stride apart.
        rows: of a sample's group; None: all places of its pictures.
    """

    pictures: int
    groups: int
    width: int
    grid: Grid
    padding: tuple[int, int, int] = NONE
    stride: tuple[int, int, int] = ONE
    rows: int | None = None

    def shape(self, pictures: int) -> tuple[int, int, int]:
        """Returns the shape of so many packed pictures."""
        rows = self.rows
        if rows is None:
            rows = prod(self.grid.phases) * self.pictures * prod(self.grid.sizes)
        return pictures // self.pictures * self.groups, rows, self.width


class Packed(NamedTuple):
    """Packed operands, in bfloat16, float16, or float32 that is to be multiplied as such.

    Attributes:
        scale: [B] float32, of the products of a sample's operands; None: they are not scaled.
    """

    x: Tensor
    y: Tensor
    scale: Tensor | None


class Layout(NamedTuple):
    """Says where the operands of a convolution lie, which follows from their shapes.

    Attributes:
        geometry: after `folds`.
        folds: pixels under the taps of a row are packed as channels.
        positions: output positions in each dimension.
        inputs, outputs: channels of a group, as they are given.
        to_x, to_y: how operands are packed.
        taps: of a run, which is one linear layer: neighbouring rows of x.
        places: where each run starts in a sample's packed x, in elements.
    """

    geometry: Geometry
    folds: bool
    positions: tuple[int, int, int]
    inputs: int
    outputs: int
    to_x: Target
    to_y: Target
    taps: int
    places: tuple[int, ...]

    @property
    def values(self) -> int:
        """Returns the number of values of a packed sample's G."""
        taps = prod(self.geometry.taps)
        return self.geometry.groups * self.to_y.width * taps * self.to_x.width

    @property
    def elements(self) -> int:
        """Returns the number of values of a sample's packed operands."""
        return sum(prod(to.shape(to.pictures)) for to in (self.to_x, self.to_y))

    @property
    def tiles(self) -> int:
        """Returns how many programs form a sample's G."""
        columns = len(self.places) * ceil(self.taps * self.to_x.width / TILE)
        return self.geometry.groups * ceil(self.to_y.width / TILE) * columns


@lru_cache(maxsize=1024)
def grid_of(geometry: Geometry, positions: tuple[int, ...]) -> Grid:
    """Returns the grid of a convolution with so many output positions in each dimension."""
    axes = list(zip(geometry.taps, geometry.stride, geometry.dilation, strict=True))
    phases = [
        1 + max(k * dilation % stride for k in range(taps)) for taps, stride, dilation in axes
    ]
    sizes = [
        count + (taps - 1) * dilation // stride
        for count, (taps, stride, dilation) in zip(positions, axes, strict=True)
    ]
    return Grid(tuple(phases), tuple(sizes))  # type: ignore[arg-type]


def is_narrow(shape: Sequence[int], groups: int) -> bool:
    """Returns whether matrix units are of no use to a weight of this shape.

    A group has few channels then, as in a depthwise convolution, or few taps too if it is the only
    one.
    """
    return shape[0] * shape[1] <= NARROW * groups and (groups > 1 or prod(shape) <= NARROW_VALUES)


def places_of_pixels(pixels: tuple[int, ...], to: Target) -> Tensor:
    """Returns where each pixel of a sample's first picture goes among its rows: int32 [D · H · W].

    It is −1 of pixels that no tap meets.
    """
    phase, place, is_met = (torch.zeros(1, 1, 1, dtype=torch.int32, device="cpu") for _ in range(3))
    for n, size in enumerate(pixels):
        shape = [1] * n + [-1] + [1] * (2 - n)
        padded = torch.arange(size, dtype=torch.int32, device="cpu").view(shape) + to.padding[n]
        own, at = padded % to.stride[n], padded // to.stride[n]
        phase, place = phase * to.grid.phases[n] + own, place * to.grid.sizes[n] + at
        is_met = is_met + (own < to.grid.phases[n]) * (at < to.grid.sizes[n])
    found = phase * (to.pictures * prod(to.grid.sizes)) + place
    return found.masked_fill(is_met < len(pixels), -1).flatten()


def gaps_of(places: Tensor, to: Target) -> Tensor:
    """Returns the rows of a sample that no pixel goes to, int32, from `places_of_pixels`."""
    is_gap = torch.ones(to.shape(to.pictures)[1], dtype=torch.bool, device="cpu")
    for picture in range(to.pictures):
        is_gap[places[places >= 0] + picture * prod(to.grid.sizes)] = False
    return is_gap.nonzero().flatten().int()


@lru_cache(maxsize=1024)
def places_of(geometry: Geometry, grid: Grid, pictures: int) -> tuple[int, ...]:
    """Returns the place that each tap meets at the first position of a sample."""
    found = []
    for taps in product(*map(range, geometry.taps)):
        phase = place = 0
        for n, (tap, stride, dilation) in enumerate(
            zip(taps, geometry.stride, geometry.dilation, strict=True)
        ):
            phase = phase * grid.phases[n] + tap * dilation % stride
            place = place * grid.sizes[n] + tap * dilation // stride
        found.append(phase * pictures * prod(grid.sizes) + place)
    return tuple(found)


def runs_of(geometry: Geometry, grid: Grid, pictures: int) -> tuple[int, tuple[int, ...]]:
    """Returns the number of taps of a run, and the place that each run's first tap meets.

    The taps of a row are a run where they meet neighbouring places. Else each tap is one.
    """
    places, taps = places_of(geometry, grid, pictures), geometry.taps[2]
    firsts = places[::taps]
    if all(place == firsts[n // taps] + n % taps for n, place in enumerate(places)):
        return taps, firsts
    return 1, places


def patches(x: Tensor, geometry: Geometry, positions: tuple[int, ...]) -> Tensor:
    """Returns the pixels under each tap: a view [N, C, *positions, *taps] of padded x.

    Args:
        x: [N, C, D, H, W].
        positions: output positions in each dimension.
    """
    if any(geometry.padding):
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
    positions, groups, taps = y.shape[2:], geometry.groups, prod(geometry.taps)
    pictures = y.shape[0] // max(1, batch_size)
    inputs, outputs = x.shape[1] // groups, y.shape[1] // groups
    length = pictures * prod(positions)  # summed over
    found = patches(x, geometry, positions)
    found = found.view(batch_size, pictures, groups, inputs, *positions, *geometry.taps)
    found = found.permute(0, 2, 1, 4, 5, 6, 3, 7, 8, 9)
    right = found.reshape(batch_size * groups, length, inputs * taps)
    own = y.view(batch_size, pictures, groups, outputs, *positions).permute(0, 2, 3, 1, 4, 5, 6)
    left = own.reshape(batch_size * groups, outputs, length)
    return torch.bmm(left, right).view(batch_size, groups * outputs, inputs, taps)
