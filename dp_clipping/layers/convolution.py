"""Convolutions of one to three dimensions, and transposed ones, as linear layers on patches.

    G_i[o, c, k] = Σ_l y_i[o, l] · x_i[c, l·stride + k·dilation − padding]

y are output gradients, x inputs, l output positions and k the kernel's taps (Rochette et al. 2019,
arXiv:1912.06015). A transposed convolution is the same with x and y exchanged. Forward and the
input's gradient are PyTorch's own.

The kernels keep G where it is smaller than x and y together. Elsewhere they keep x and y. Then,
where positions are few, norms come from Gram matrices, and G_i is computed for the sum. Where they
are many, G_i is computed for the norm and, by the same operations, again for the sum, so that the
summed values are those of the norm.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import (
    ACCUMULATED,
    SUM_ROUNDING,
    full_float32,
    stored_dtype,
    sum_of_pictures,
)
from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.kernels.convolution import gram
from dp_clipping.kernels.convolution.geometry import NARROW, Geometry, gradients_plain
from dp_clipping.kernels.convolution.layout import (
    Layout,
    Pair,
    layout_of,
    memory_of_gradients,
    packed,
    pairs_of,
    pairs_of_groups,
    weight_of,
)
from dp_clipping.kernels.convolution.narrow import narrow_gradients
from dp_clipping.kernels.convolution.packing import Packed
from dp_clipping.kernels.gradient import gradients_and_squares
from dp_clipping.kernels.launch.tiles import ceil_div
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.handle import LayerState, autocast_operands, forward_of
from dp_clipping.layers.recorder import DENSE, FACTORS

CHUNK_ELEMENTS = 1 << 25  # of patches that are formed at a time
PACKED_BYTES = 1 << 26  # of operands that are packed at a time, if nothing else keeps them
LEAST_PROGRAMS = 192  # of a launch, if samples are divided: fewer leave processors idle
KINDS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def is_plain(kind: type) -> bool:
    """Returns whether a class is one of PyTorch's convolutions, with no method changed.

    A subclass may keep `forward` and change what that calls: standardise the weight, for example.
    """
    base = next((c for c in kind.__mro__ if c in KINDS), None)
    if base is None:
        return False
    changed = kind.__mro__[: kind.__mro__.index(base)]
    own = {name for c in changed for name, value in vars(c).items() if callable(value)}
    return own <= {"__init__"}


def _first_call(
    self: nn.Module, handle: LayerState, x: Tensor, output_size: list[int] | None = None
) -> Tensor:
    weight, bias = self.weight, self.bias
    tensor_parallel.refuse_distributed(handle, x, weight, bias)
    rows, layout, restored = handle.pictures(tensor_parallel.settled(x))
    if rows.ndim != weight.ndim:
        raise ValueError(
            f"{handle.name or 'the network'} got an input of shape {tuple(x.shape)}: give it "
            f"[batch, channels, ...] of {weight.ndim} dimensions"
        )
    padded, padding = _padded(self, rows)
    options = (
        list(self.stride), padding, list(self.dilation), self.transposed,
        _output_padding(self, padded, output_size), self.groups,
    )  # fmt: skip
    how = (options, _geometry(weight.shape, options))
    given = x if padded is x and output_size is None else None
    if torch.compiler.is_compiling():
        padded, weight, bias = autocast_operands(padded, weight, bias)
    y = handle.run(Convolution, self, padded, layout, weight, bias, how, SETTINGS, given)
    return restored(y)


forward = forward_of("convolution", _first_call)
SETTINGS = attrgetter(
    "stride", "padding", "padding_mode", "dilation", "output_padding", "groups"
)  # of a convolution, which may change between steps


def _padded(module: nn.Module, x: Tensor) -> tuple[Tensor, list[int]]:
    """Returns the input and the symmetric zero padding that is left for the convolution."""
    none = [0] * len(module.stride)
    if module.padding == "valid":
        return x, none
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        sides = [(each // 2, each - each // 2) for each in total]
    else:
        sides = [(each, each) for each in module.padding]
    if module.padding_mode == "zeros" and all(left == right for left, right in sides):
        return x, [left for left, _ in sides]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, [side for both in reversed(sides) for side in both], mode=mode), none


def _output_padding(module: nn.Module, x: Tensor, output_size: list[int] | None) -> list[int]:
    """Returns the output padding of a transposed convolution for a requested output size."""
    if not module.transposed or output_size is None:
        return list(module.output_padding)
    settings = zip(
        output_size[-len(module.stride) :], x.shape[2:], module.stride, module.padding,
        module.dilation, module.kernel_size, strict=True,
    )  # fmt: skip
    return [
        size - ((given - 1) * stride - 2 * padding + dilation * (taps - 1) + 1)
        for size, given, stride, padding, dilation, taps in settings
    ]


def _geometry(shape: torch.Size, options: tuple) -> Geometry:
    """Returns a convolution's geometry in three dimensions."""
    stride, padding, dilation, *_, groups = options
    missing = 5 - len(shape)
    ones, zeros = [1] * missing, [0] * missing
    return Geometry(
        (*ones, *shape[2:]), (*ones, *stride), (*zeros, *padding), (*ones, *dilation), groups
    )


class Convolution(torch.autograd.Function):
    """Runs `F.conv{1,2,3}d` or its transpose; its backward delivers per-sample gradients.

    `rest` has the site, the private step and options. In a compiled region it has None and where
    samples are: there the G are the gradients of the slots.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, weight_slot, bias_slot, rest):
        site, private_step, (options, _) = rest
        if site is not None and site.cast is not None:
            x, weight = x.to(site.cast), weight.to(site.cast)
            bias = None if bias is None else bias.to(site.cast)
        if site is None:
            ctx.save_for_backward(x, weight)
        else:
            ctx.to_save = x, weight  # by no function in Python
        ctx.rest = rest
        ctx.slot_dtype = None if weight_slot is None else weight_slot.dtype
        y = torch.convolution(x, weight, bias, *options)
        if site is not None and site.weight is not None and private_step.plans.measures:
            private_step.plans.note_other(site.weight, x, y, PACKED_BYTES)
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        site, private_step, (options, geometry) = ctx.rest
        batch_size = private_step[2] if site is None else private_step.batch_size
        gx = gradients = biases = None
        if ctx.needs_input_grad[0]:
            backward = torch.ops.aten.convolution_backward
            gx = backward(gy, x, weight, None, *options, [True, False, False])[0]
        if ctx.needs_input_grad[4] if site is None else site.bias is not None:
            sums = gy.flatten(2).sum(2, dtype=ACCUMULATED.get(gy.dtype, torch.float32))
            is_whole = sums.shape[0] == batch_size
            biases = sums if is_whole else sum_of_pictures(sums, batch_size)
        if ctx.needs_input_grad[3] if site is None else site.weight is not None:
            use = Factors(x, gy, weight.shape, batch_size, geometry, transposed=options[3])
            if site is None:
                gradients = use.dense().to(ctx.slot_dtype)
            elif not use.is_narrow and x.dtype in private_step.kernel_dtypes:
                private_step.take(FACTORS, (site.weight,), use, use.held(use))
            else:
                gradients = use.dense(x.dtype in private_step.kernel_dtypes)
        if site is None:
            return gx, None, None, gradients, biases, None
        for record, own in ((site.weight, gradients), (site.bias, biases)):
            if record is not None and own is not None:
                private_step.take(DENSE, (record,), (own, None), (own,))
        return gx, None, None, None, None, None


class Factors:
    """Factors of one use: x [N, C, ..] and y [N, O, ..], N a multiple of B; G is [B, *weight]."""

    held = attrgetter("x", "y")

    def __init__(
        self, x: Tensor, y: Tensor, shape: torch.Size, batch_size: int, geometry: Geometry,
        transposed: bool,
    ):  # fmt: skip
        self.shape, self.batch_size, self.geometry = shape, batch_size, geometry
        # Matrix units do not serve so few channels of a group, as in a depthwise convolution.
        self.is_narrow = shape[0] * shape[1] <= NARROW * geometry.groups
        while x.dim() < 5:
            x, y = x.unsqueeze(2), y.unsqueeze(2)
        # Of a transposed convolution the outputs are what is shifted.
        self.x, self.y = (y, x) if transposed else (x, y)

    def dense(self, on_kernels: bool = False) -> Tensor:
        """Returns G [B, *parameter] in `accumulation_dtype(dtype)`, on kernels if these serve it.

        Without kernels, some samples' patches are formed at a time.
        """
        if on_kernels and self.is_narrow:
            found = narrow_gradients(self.x, self.y, self.geometry, self.batch_size)
            return found.view(self.batch_size, *self.shape)
        rows, dtype = self.x.shape[0], ACCUMULATED.get(self.y.dtype, torch.float32)
        pictures = rows // max(1, self.batch_size)
        positions = prod(self.y.shape[2:])
        each = max(1, pictures * positions * self.x.shape[1] * prod(self.geometry.taps))
        step = max(1, CHUNK_ELEMENTS // each) * max(1, pictures)
        if not self.batch_size:
            return self.y.new_zeros(0, *self.shape, dtype=dtype)
        pieces = [(self.x, self.y)]
        if rows > step:
            pieces = list(zip(self.x.split(step), self.y.split(step), strict=True))
        with full_float32():
            found = [
                gradients_plain(x.to(dtype), y.to(dtype), self.geometry, x.shape[0] // pictures)
                for x, y in pieces
            ]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole.view(self.batch_size, *self.shape)

    def on_kernels(self) -> "KernelFactors":
        """Returns the same for the kernels."""
        return KernelFactors(self)


class KernelFactors:
    """Operands of one use, packed for the kernels of linear layers; see `take_norms`.

    Attributes:
        layout: of packed operands.
        samples: how many are packed at a time, if G is kept in their place; 0: it is larger.
        values: the packed operands' tensors, of which the sum will be formed.
        scale: [B] float32, by which gradients and products of `values` are multiplied, or None.
        pairs: `values` as operands of linear layers [B, T, ..], one of each run.
        gradients: G of each run [B, ..], or None.
    """

    held = attrgetter("values")

    def __init__(self, use: Factors):
        self.use: Any = use
        self._shape, self._geometry, self.batch_size = use.shape, use.geometry, use.batch_size
        wide = use.x.dtype == torch.float32
        self._tf32 = wide and torch.backends.cudnn.conv.fp32_precision == "tf32"
        self.dtype = torch.float16 if self._tf32 else use.x.dtype
        pictures = max(1, use.x.shape[0] // max(1, self.batch_size))
        given = use.x.shape, use.y.shape
        self.layout = layout_of(*given, self.dtype.itemsize, pictures, use.geometry)
        self.samples = samples_at_a_time(self.layout, self.dtype, self.batch_size, PACKED_BYTES)
        self.values: tuple[Tensor, ...] = ()  # may be the layer's own
        self.scale: Tensor | None = None
        self.pairs: list[Pair] = []
        self.gradients: list[Tensor] | None = None

    def pack(self) -> Packed:
        """Packs all samples, in place of what they are packed from."""
        use, self.use = self.use, None
        found = packed(use.x, use.y, self.layout, self._geometry, self._tf32)
        self.values, self.scale = found[:2], found.scale
        self.pairs = pairs_of(found, self.layout)
        return found

    def keep(self, gradients: list[Tensor]) -> None:
        """Keeps G [B · groups, ..] of each run in place of the operands."""
        self.values, self.pairs = (), []
        self.gradients = [g.view(self.batch_size, -1, g.shape[2]) for g in gradients]

    def take_norms_of_pieces(self) -> Tensor:
        """Returns squared norms [runs, B] and keeps G; some samples after others are packed."""
        size, layout, samples = self.batch_size, self.layout, self.samples
        pictures, groups = layout.to_x.pictures, self._geometry.groups
        use, self.use = self.use, None
        x, y = use.x, use.y
        del use
        gradients = memory_of_gradients(y, layout, size, stored_dtype(self.dtype))
        squares, scales = [], []
        for first in range(0, size, samples):
            rows = slice(first * pictures, (first + samples) * pictures)
            own = slice(first * groups, (first + samples) * groups)
            piece = packed(x[rows], y[rows], layout, self._geometry, self._tf32)
            if first + samples >= size:
                del x, y  # nobody else may have them
            found = gradients_and_squares(
                pairs_of(piece, layout), None, [g[own] for g in gradients]
            )
            squares.append(torch.stack([one for _, one in found]))
            scales.append(piece.scale)
            del piece  # before others are packed
        if scales[0] is not None:
            self.scale = torch.cat(scales)
        self.keep(gradients)
        return self.of_samples(torch.cat(squares, 1))

    def of_samples(self, squares: Tensor) -> Tensor:
        """Returns squared norms [runs, B] from those of groups of scaled operands."""
        groups = self._geometry.groups
        if groups > 1:
            squares = squares.unflatten(1, (self.batch_size, groups)).sum(2)
        return squares if self.scale is None else squares * (self.scale * self.scale)

    def summands(self) -> list[Pair]:
        """Returns operands [B, T, ..] whose sums `shaped` takes, several for each run's groups."""
        if not self.values:  # of a second backward
            self.pack()
        groups = self._geometry.groups
        return self.pairs if groups == 1 else pairs_of_groups(self.pairs, groups)

    def shaped(self, totals: list[Tensor]) -> Tensor:
        """Returns the sum in the parameter's shape, from those of `gradients` or `summands`."""
        groups = self._geometry.groups
        if self.gradients is None and groups > 1:
            firsts = range(0, len(totals), groups)
            totals = [torch.stack(totals[first : first + groups]) for first in firsts]
        return weight_of(totals, self.layout, self._shape)


Rows = tuple[Tensor, Tensor | None, float, float]
"""Squared norms [n, B], whose sum is a parameter's, and the rest as in `Norms.add_rows`."""


def take_norms(uses: Sequence[KernelFactors], keep: bool) -> list[Rows]:
    """Returns norms of each use; with `keep`, G is stored where it is smaller than operands.

    Few launches serve those that are packed at once.
    """
    found: list[Any] = [None] * len(uses)
    together: dict[bool, list[int]] = {}
    for n, use in enumerate(uses):
        stores = keep and use.samples > 0
        if stores and use.samples < use.batch_size:
            found[n] = use.take_norms_of_pieces(), None, 0.0, 0.0
            continue
        operands = use.pack()
        if not stores and gram.pays(use.layout, use.dtype.itemsize):
            squares, scales = gram.gram_squares(operands, use.layout)
            positions = use.layout.to_x.pictures * prod(use.layout.positions)
            error = positions * SUM_ROUNDING[torch.float32]
            found[n] = squares[None], scales[None], GRAM_ROUNDING, error
        else:
            together.setdefault(stores, []).append(n)
    for stores, numbers in together.items():
        pairs: list[Pair] = []
        for n in numbers:
            pairs += uses[n].pairs
        results = gradients_and_squares(pairs, None, stores)
        for n in numbers:
            use = uses[n]
            own, results = results[: len(use.pairs)], results[len(use.pairs) :]
            gradients, squares = zip(*own, strict=True)
            found[n] = use.of_samples(torch.stack(squares)), None, 0.0, 0.0
            if stores:
                use.keep(gradients)
    return found


@lru_cache(maxsize=1024)
def samples_at_a_time(layout: Layout, dtype: torch.dtype, batch_size: int, most: int) -> int:
    """Returns how many samples are packed at a time, if G is smaller; 0: it is not.

    They take `most` bytes, or are as many as make `LEAST_PROGRAMS`, if these are more.

    Args:
        dtype: of packed operands.
    """
    operands = batch_size * layout.elements * dtype.itemsize
    if batch_size * layout.values * stored_dtype(dtype).itemsize > operands:
        return 0
    programs = batch_size * layout.tiles
    pieces = min(batch_size, ceil_div(operands, most), max(1, programs // LEAST_PROGRAMS))
    return ceil_div(batch_size, pieces) if pieces else 1
