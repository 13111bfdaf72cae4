"""Convolutions of one to three dimensions, and transposed ones, as linear layers on patches.

    G_i[o, c, k] = Σ_l y_i[o, l] · x_i[c, l·stride + k·dilation − padding]

y are output gradients, x inputs, l output positions and k the kernel's taps (Rochette et al. 2019,
arXiv:1912.06015). A transposed convolution is the same with x and y exchanged. Forward and the
input's gradient are PyTorch's own.

`kernels.convolution` has what kernels do with x and y.
"""

from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_clipping.clipping.accumulation import ACCUMULATED, autocast_operands, sum_of_pictures
from dp_clipping.kernels.convolution import packing
from dp_clipping.kernels.convolution.geometry import Geometry, is_narrow
from dp_clipping.kernels.convolution.layout import ConvolutionFactors, dense_gradients
from dp_clipping.kernels.convolution.narrow import narrow_gradients
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.handle import LayerState, forward_of
from dp_clipping.layers.recorder import DENSE, FACTORS

ONE_TAP = Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
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
    how = (options, _geometry(weight.shape, options), is_narrow(weight.shape, self.groups))
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
        site, private_step, (options, *_) = rest
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
            private_step.plans.note_other(site.weight, x, y, packing.PACKED_BYTES)
        return y

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        if type(gy) is not Tensor or torch.is_grad_enabled():
            gy = tensor_parallel.arrived(gy)
        site, private_step, (options, geometry, is_narrow) = ctx.rest
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
            left, right = (gy, x) if options[3] else (x, gy)  # transposed, the outputs are shifted
            while left.dim() < 5:
                left, right = left.unsqueeze(2), right.unsqueeze(2)
            if site is None:
                gradients = dense_gradients(left, right, weight.shape, geometry, batch_size)
                gradients = gradients.to(ctx.slot_dtype)
            elif x.dtype not in private_step.kernel_dtypes:
                gradients = dense_gradients(left, right, weight.shape, geometry, batch_size)
            elif is_narrow:
                gradients = narrow_gradients(left, right, geometry, batch_size)
                gradients = gradients.view(batch_size, *weight.shape)
            else:
                use = ConvolutionFactors(left, right, weight.shape, batch_size, geometry)
                private_step.take(FACTORS, (site.weight,), use, use.values)
        if site is None:
            return gx, None, None, gradients, biases, None
        for record, own in ((site.weight, gradients), (site.bias, biases)):
            if record is not None and own is not None:
                private_step.take(DENSE, (record,), None, (own,))
        return gx, None, None, None, None, None


def rounded_product(left: Tensor, right: Tensor) -> ConvolutionFactors:
    """Returns the factors of G_i = left_iᵀ right_i of [B, T, d] and [B, T, p] in float32, rounded.

    It is a convolution of one tap over T positions.
    """
    shape = torch.Size((left.shape[2], right.shape[2]))
    x, y = (one.mT[:, :, None, None] for one in (right, left))
    return ConvolutionFactors(x, y, shape, len(left), ONE_TAP, rounds=True)
