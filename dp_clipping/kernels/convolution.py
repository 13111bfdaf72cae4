"""Per-sample gradients of convolutions, their norms and their clipped sum, without patches.

    G_i[o, c, k] = Σ_l y_i[l, o] · x_i[l·stride + k·dilation − padding, c]

l runs over output positions and k over the kernel's taps: for each tap it is a linear layer whose
rows are shifted pixels, so the kernels read x itself. Channels come last, which makes a row of
channels one contiguous piece.

`gradients_and_squares` accumulates a tile of one sample's G in float32 registers and squares the
values that it stores. Without storing it computes norms only; `weighted_sum` then accumulates the
same tiles again, in the same order, and adds each times its coefficient. So what is summed is what
was normed, in TensorFloat-32 too.

Matrix units take TensorFloat-32 operands in one layout only, which is not this one. So where
convolutions may use it, float32 operands are packed as float16, which has as many digits, after
each sample is scaled by a power of two: its largest value is rounded to 2⁻¹¹ of itself, and what is
below 2⁻³⁸ of that becomes zero.

Operations: 2·B·L·taps·C·O, those of the ordinary weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.kernels.launch.tiles import ceil_div, triton

if triton is not None:
    import triton.language as tl

EXPONENT = 14  # of the largest value in float16
SMALLEST = -100  # exponent of a sample's largest value, below which it is scaled no further
PACKED = 64  # channels and pixels that a program packs
PROGRAMS = 1056  # eight for each processor of an H200, over which a sum divides its samples
MOST = 1024  # pixels that a program of a narrow convolution loads at a time
NARROW = 16  # inputs times outputs of a group, up to which matrix units are left alone
LEAST = 16  # channels of a group on either side, below which matrix units have nothing to do


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

    def is_wide(self, inputs: int, outputs: int) -> bool:
        """Returns whether matrix units pay, for so many channels in all groups together."""
        return min(inputs, outputs) >= LEAST * self.groups

    def is_narrow(self, inputs: int, outputs: int) -> bool:
        """Returns whether a group has so few channels, as in a depthwise convolution."""
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


@dataclass(frozen=True)
class Operand:
    """A tensor [N, *positions, C] as the kernels read it, and what its samples were divided by.

    Attributes:
        values: contiguous, in bfloat16, float16, or float32 that is to be multiplied as such.
        exponents: [B] int32, log₂ of each sample's divisor; None: 1.
    """

    values: Tensor
    exponents: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.values.nbytes


def pack(x: Tensor, batch_size: int, tf32: bool) -> Operand:
    """Returns x with the channels last; float32 as scaled float16 if TensorFloat-32 may be used.

    Args:
        x: [N, C, D, H, W], N a multiple of B, in float32, bfloat16 or float16.
    """
    exponents = None
    if tf32 and x.dtype == torch.float32 and x.numel():
        largest = torch.linalg.vector_norm(x.reshape(batch_size, -1), torch.inf, dim=1)
        exponents = torch.frexp(largest).exponent.clamp_min(SMALLEST) - EXPONENT
    last = x.movedim(1, -1)
    if exponents is None and last.is_contiguous():
        return Operand(last, None)
    if not x.is_contiguous() or not x.numel():
        x = x.contiguous()
    dtype = x.dtype if exponents is None else torch.float16
    values = x.new_empty(last.shape, dtype=dtype)
    pictures, channels, pixels = x.shape[0], x.shape[1], x.shape[2:].numel()
    if x.numel():
        grid = (ceil_div(pixels, PACKED), ceil_div(channels, PACKED), pictures)
        factors = x if exponents is None else _power_of_two(-exponents)
        _pack_kernel[grid](
            x, values, factors, pictures // batch_size, channels, pixels,
            SCALED=exponents is not None, BLOCK=PACKED, num_warps=4,
        )  # fmt: skip
    return Operand(values, exponents)


def gradients_and_squares(
    x: Operand, y: Operand, geometry: Geometry, batch_size: int, store: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Returns G [B, O, taps, C / groups], None unless `store`, and its squared norms [B] float32.

    G is in `stored_dtype`, float32 where that is what was packed.

    Args:
        x: the input, [N, D, H, W, C].
        y: the output gradients, [N, *positions, O].
    """
    work = _Work(x, y, geometry, batch_size)
    gradients = None
    if store:
        shape = (batch_size, y.values.shape[-1], work.taps, work.inputs)
        scaled = x.exponents is not None
        dtype = torch.float32 if scaled else stored_dtype(x.values.dtype)
        gradients = x.values.new_empty(shape, dtype=dtype)
    squares = x.values.new_empty(batch_size, work.tiles, dtype=torch.float32)
    if not work.is_empty:
        _gradient_kernel[(batch_size * work.tiles,)](
            x.values, y.values, work.factors, gradients, squares, batch_size, STORE=store,
            **work.arguments,
        )  # fmt: skip
    else:
        squares.zero_()
        if gradients is not None:
            gradients.zero_()
    return gradients, squares.sum(1, dtype=torch.float64).float()


def weighted_sum(x: Operand, y: Operand, geometry: Geometry, coefficients: Tensor) -> Tensor:
    """Returns Σ_i c_i G_i [O, taps, C / groups] float32, over the samples with c_i > 0.

    Args:
        x, y: as `gradients_and_squares` takes them.
        coefficients: c [B] float32.
    """
    batch_size, outputs = len(coefficients), y.values.shape[-1]
    work = _Work(x, y, geometry, batch_size)
    if work.is_empty:
        return coefficients.new_zeros(outputs, work.taps, work.inputs)
    splits = min(batch_size, max(1, PROGRAMS // work.tiles))
    share = ceil_div(batch_size, splits)
    splits = ceil_div(batch_size, share)
    parts = coefficients.new_empty(splits, outputs, work.taps, work.inputs)
    _weighted_kernel[(splits * work.tiles,)](
        x.values, y.values, work.factors, coefficients.contiguous(), parts, batch_size, share,
        **work.arguments,
    )  # fmt: skip
    return parts.sum(0) if splits > 1 else parts[0]


def narrow_gradients(x: Tensor, y: Tensor, geometry: Geometry, batch_size: int) -> Tensor:
    """Returns G [B, O, C / groups, taps] float32 of a convolution with few channels in a group.

    Args:
        x: [N, C, D, H, W], N a multiple of B; y: [N, O, *positions].
    """
    x, y = x.contiguous(), y.contiguous()
    inputs, taps = x.shape[1] // geometry.groups, prod(geometry.taps)
    gradients = x.new_zeros(len(x), y.shape[1], inputs, taps, dtype=torch.float32)
    pixels = y.shape[2:].numel()
    if gradients.numel() and pixels:
        block = min(MOST, triton.next_power_of_2(pixels))
        _narrow_kernel[(gradients.numel() // taps,)](
            x, y, gradients, **_numbers(geometry, x.shape[2:], y.shape[2:]), n_inputs=inputs,
            n_outputs=y.shape[1] // geometry.groups, n_groups=geometry.groups, BLOCK=block,
            num_warps=4 if block > 256 else 1,
        )  # fmt: skip
    return gradients.view(batch_size, -1, *gradients.shape[1:]).sum(1)


class _Work:
    """Tiles of one convolution, and the arguments that its kernels share."""

    def __init__(self, x: Operand, y: Operand, geometry: Geometry, batch_size: int):
        given, left = x.values, y.values
        pictures = len(given) // max(1, batch_size)
        self.taps, groups = prod(geometry.taps), geometry.groups
        self.inputs, outputs = given.shape[-1] // groups, left.shape[-1] // groups
        positions = prod(left.shape[1:-1])
        self.is_empty = not (batch_size and pictures and positions and self.inputs and outputs)
        scaled = x.exponents is not None and y.exponents is not None
        self.factors = given
        if scaled:
            self.factors = _power_of_two(x.exponents + y.exponents)
        wide = given.element_size() == 4
        rows, columns = _block(outputs, 128), _block(self.inputs, 64 if wide else 128)
        self.tiles = max(
            1, groups * self.taps * ceil_div(outputs, rows) * ceil_div(self.inputs, columns)
        )
        self.arguments = dict(
            pictures=pictures, **_numbers(geometry, given.shape[1:4], left.shape[1:4]),
            n_inputs=self.inputs, n_outputs=outputs, n_groups=groups, SCALED=scaled, BLOCK_O=rows,
            BLOCK_C=columns, BLOCK_L=32 if wide else 64,
            num_warps=4 if rows * columns <= 64 * 128 else 8, num_stages=3,
        )  # fmt: skip


def _numbers(
    geometry: Geometry, pixels: tuple[int, ...], positions: tuple[int, ...]
) -> dict[str, int]:
    """Arguments of the kernels that say where pixels are."""
    found = dict(zip("DHWZYX", (*pixels, *positions), strict=True))
    for name, values in (
        ("stride", geometry.stride), ("pad", geometry.padding), ("dil", geometry.dilation),
        ("taps", geometry.taps),
    ):  # fmt: skip
        found |= {f"{name}_{axis}": value for axis, value in zip("dhw", values, strict=True)}
    return found


def _power_of_two(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _block(size: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(size)))


UNSPECIALIZED = [
    "batch_size", "pictures", *"DHWZYX", "n_groups",
    *(f"{name}_{axis}" for name in ("stride", "pad", "dil", "taps") for axis in "dhw"),
]  # fmt: skip

if triton is not None:

    @triton.jit(do_not_specialize=["pictures"])
    def _pack_kernel(
        p_x, p_y, p_factors, pictures, n_channels, n_pixels, SCALED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """[C, L] of one picture -> [L, C]."""
        i_n = tl.program_id(2).to(tl.int64)
        o_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        m_l, m_c = o_l < n_pixels, o_c < n_channels
        p_x += i_n * n_channels * n_pixels + o_c[:, None] * n_pixels + o_l[None, :]
        b_x = tl.load(p_x, mask=m_c[:, None] & m_l[None, :], other=0)
        if SCALED:
            b_x *= tl.load(p_factors + i_n // pictures)
        p_y += i_n * n_channels * n_pixels + o_l[:, None] * n_channels + o_c[None, :]
        tl.store(p_y, b_x.T.to(p_y.dtype.element_ty), mask=m_l[:, None] & m_c[None, :])

    @triton.jit
    def _place(i_tile, n_inputs, n_outputs, n_taps, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr):
        """Tap, group, outputs and inputs of a tile; neighbours share rows of y."""
        n_c, n_o = tl.cdiv(n_inputs, BLOCK_C), tl.cdiv(n_outputs, BLOCK_O)
        o_c = i_tile % n_c * BLOCK_C + tl.arange(0, BLOCK_C)
        o_o = i_tile // (n_c * n_taps) % n_o * BLOCK_O + tl.arange(0, BLOCK_O)
        return i_tile // n_c % n_taps, i_tile // (n_c * n_taps * n_o), o_o, o_c

    @triton.jit
    def _offsets(
        i_tile, n_inputs, n_outputs, n_taps, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr
    ):  # fmt: skip
        """Where a tile lies in G [groups · O, taps, C], and which of its elements exist."""
        i_tap, i_g, o_o, o_c = _place(i_tile, n_inputs, n_outputs, n_taps, BLOCK_O, BLOCK_C)
        o_g = ((i_g * n_outputs + o_o[:, None]) * n_taps + i_tap) * n_inputs + o_c[None, :]
        return o_g, (o_o[:, None] < n_outputs) & (o_c[None, :] < n_inputs)

    @triton.jit
    def _tile(
        p_x, p_y, p_factors, i_b, i_tile, pictures, D, H, W, Z, Y, X, stride_d, stride_h, stride_w,
        pad_d, pad_h, pad_w, dil_d, dil_h, dil_w, taps_d, taps_h, taps_w, n_inputs, n_outputs,
        n_groups, SCALED: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_L: tl.constexpr,
    ):  # fmt: skip
        """A tile [BLOCK_O, BLOCK_C] of one sample's G, of one tap and group."""
        n_taps = taps_d * taps_h * taps_w
        i_tap, i_g, o_o, o_c = _place(i_tile, n_inputs, n_outputs, n_taps, BLOCK_O, BLOCK_C)
        m_c, m_o = o_c < n_inputs, o_o < n_outputs
        s_d = i_tap // (taps_h * taps_w) * dil_d - pad_d
        s_h = i_tap // taps_w % taps_h * dil_h - pad_h
        s_w = i_tap % taps_w * dil_w - pad_w
        n_l, n_c, n_o = Z * Y * X, n_inputs * n_groups, n_outputs * n_groups
        i_first = tl.cast(i_b, tl.int64) * pictures
        p_x += i_first * D * H * W * n_c + i_g * n_inputs
        p_y += i_first * n_l * n_o + i_g * n_outputs
        b_g = tl.zeros((BLOCK_O, BLOCK_C), tl.float32)
        for o_l in range(0, pictures * n_l, BLOCK_L):
            o_rows = o_l + tl.arange(0, BLOCK_L)
            i_picture, i_l = o_rows // n_l, o_rows % n_l
            i_d = i_l // (Y * X) * stride_d + s_d
            i_h = i_l // X % Y * stride_h + s_h
            i_w = i_l % X * stride_w + s_w
            m_l = o_rows < pictures * n_l
            m_x = m_l & (i_d >= 0) & (i_d < D) & (i_h >= 0) & (i_h < H) & (i_w >= 0) & (i_w < W)
            o_x = ((i_picture * D + i_d) * H + i_h) * W + i_w
            b_x = tl.load(
                p_x + o_x[:, None] * n_c + o_c[None, :], mask=m_x[:, None] & m_c[None, :], other=0
            )  # fmt: skip
            b_y = tl.load(
                p_y + o_rows[:, None] * n_o + o_o[None, :], mask=m_l[:, None] & m_o[None, :],
                other=0,
            )  # fmt: skip
            b_g = tl.dot(b_y.T, b_x, b_g, input_precision="ieee")
        if SCALED:
            b_g *= tl.load(p_factors + i_b)
        return b_g

    @triton.jit(do_not_specialize=UNSPECIALIZED)
    def _gradient_kernel(
        p_x, p_y, p_factors, p_g, p_squares, batch_size, pictures, D, H, W, Z, Y, X,
        stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
        taps_d, taps_h, taps_w, n_inputs, n_outputs, n_groups, SCALED: tl.constexpr,
        BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, STORE: tl.constexpr,
    ):  # fmt: skip
        n_tiles = tl.num_programs(0) // batch_size
        i_b, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
        b_g = _tile(
            p_x, p_y, p_factors, i_b, i_tile, pictures, D, H, W, Z, Y, X,
            stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
            taps_d, taps_h, taps_w, n_inputs, n_outputs, n_groups,
            SCALED, BLOCK_O, BLOCK_C, BLOCK_L,
        )  # fmt: skip
        if STORE:
            n_taps = taps_d * taps_h * taps_w
            o_g, m_g = _offsets(i_tile, n_inputs, n_outputs, n_taps, BLOCK_O, BLOCK_C)
            b_rounded = b_g.to(p_g.dtype.element_ty)
            n_g = tl.cast(n_inputs * n_outputs * n_groups, tl.int64) * n_taps
            tl.store(p_g + i_b * n_g + o_g, b_rounded, mask=m_g)
            b_g = b_rounded.to(tl.float32)
        tl.store(p_squares + tl.program_id(0), tl.sum(b_g * b_g))

    @triton.jit(do_not_specialize=[*UNSPECIALIZED, "share"])
    def _weighted_kernel(
        p_x, p_y, p_factors, p_c, p_total, batch_size, share, pictures, D, H, W, Z, Y, X,
        stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
        taps_d, taps_h, taps_w, n_inputs, n_outputs, n_groups, SCALED: tl.constexpr,
        BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
    ):  # fmt: skip
        n_tiles = tl.num_programs(0) // tl.cdiv(batch_size, share)
        i_split, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
        b_total = tl.zeros((BLOCK_O, BLOCK_C), tl.float32)
        i_first = i_split * share
        for i_b in range(i_first, tl.minimum(i_first + share, batch_size)):
            c = tl.load(p_c + i_b)
            if c > 0:
                b_total += c * _tile(
                    p_x, p_y, p_factors, i_b, i_tile, pictures, D, H, W, Z, Y, X,
                    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w,
                    taps_d, taps_h, taps_w, n_inputs, n_outputs, n_groups,
                    SCALED, BLOCK_O, BLOCK_C, BLOCK_L,
                )  # fmt: skip
        n_taps = taps_d * taps_h * taps_w
        o_g, m_g = _offsets(i_tile, n_inputs, n_outputs, n_taps, BLOCK_O, BLOCK_C)
        n_g = tl.cast(n_inputs * n_outputs * n_groups, tl.int64) * n_taps
        tl.store(p_total + i_split * n_g + o_g, b_total, mask=m_g)

    @triton.jit(do_not_specialize=UNSPECIALIZED)
    def _narrow_kernel(
        p_x, p_y, p_g, D, H, W, Z, Y, X, stride_d, stride_h, stride_w, pad_d, pad_h, pad_w,
        dil_d, dil_h, dil_w, taps_d, taps_h, taps_w, n_inputs, n_outputs, n_groups,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """All taps of one input and output of one picture, channels first."""
        i_row = tl.program_id(0).to(tl.int64)
        i_c, i_y = i_row % n_inputs, i_row // n_inputs
        i_n, i_g = i_y // (n_outputs * n_groups), i_y % (n_outputs * n_groups) // n_outputs
        n_l, n_taps = Z * Y * X, taps_d * taps_h * taps_w
        p_x += ((i_n * n_groups + i_g) * n_inputs + i_c) * D * H * W
        p_y += i_y * n_l
        for i_tap in range(n_taps):
            s_d = i_tap // (taps_h * taps_w) * dil_d - pad_d
            s_h = i_tap // taps_w % taps_h * dil_h - pad_h
            s_w = i_tap % taps_w * dil_w - pad_w
            b_sum = tl.zeros((BLOCK,), tl.float32)
            for o_first in range(0, n_l, BLOCK):
                o_l = o_first + tl.arange(0, BLOCK)
                i_d = o_l // (Y * X) * stride_d + s_d
                i_h = o_l // X % Y * stride_h + s_h
                i_w = o_l % X * stride_w + s_w
                m_l = o_l < n_l
                m_x = m_l & (i_d >= 0) & (i_d < D) & (i_h >= 0) & (i_h < H)
                m_x = m_x & (i_w >= 0) & (i_w < W)
                b_x = tl.load(p_x + (i_d * H + i_h) * W + i_w, mask=m_x, other=0)
                b_y = tl.load(p_y + o_l, mask=m_l, other=0)
                b_sum += b_x.to(tl.float32) * b_y.to(tl.float32)
            tl.store(p_g + i_row * n_taps + i_tap, tl.sum(b_sum))
