"""`nn.LSTM`, `nn.GRU` and `nn.RNN`, and Opacus's: their layers, one after the other.

For each of them the inputs' share of the gates is a linear layer on all tokens (see `projection`),
all time steps of all directions are one call of PyTorch's kernel (`kernel`), and `recurrence`
computes the gradients of the weights that the kernel reads. Between layers the padding of packed
sequences is zero, and sequences are in the order of the batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.clipping.accumulation import autocast_of
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.projection import Linear
from dp_clipping.layers.recurrent import kernel
from dp_clipping.layers.recurrent.kinds import mode_of
from dp_clipping.layers.recurrent.packing import Packing, reordered
from dp_clipping.layers.recurrent.recurrence import Enter, Layer, Leave, Part, Run
from dp_clipping.torch_compat import apply_directly, never_compiled, transforms_run

KINDS = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
ENTER, LEAVE = apply_directly(Enter), apply_directly(Leave)


@never_compiled
def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
    """Computes the module; as in PyTorch, a packed sequence is returned for one that is given."""
    handle: Any = self._private
    if handle.private_step is None:
        return type(self).forward(self, *args, **kwargs)
    return _all_layers(self, handle, *args, **kwargs)


def _all_layers(
    self: nn.RNNBase,
    handle: LayerState,
    input: Tensor | PackedSequence,
    hx: Any = None,
    state_init: Any = None,
) -> Any:
    """Returns the module's outputs. Opacus's layers call first states `state_init`."""
    hx = state_init if hx is None else hx
    tokens = input.data if isinstance(input, PackedSequence) else input
    if torch.is_autocast_enabled(tokens.device.type) and _stays_wide(self, tokens):
        with torch.autocast("cpu", enabled=False):
            return _all_layers(self, handle, input, hx)
    layers = _layers_of(self, handle, input, tokens, hx)
    is_lstm = layers[0].mode == "LSTM"
    first = () if hx is None else tuple(hx) if is_lstm else (hx,)
    packing = None
    if isinstance(input, PackedSequence):
        packing = Packing.of(input)
        x = packing.pad(tokens)
    else:
        x = tokens.transpose(0, 1) if self.batch_first else tokens
    last = []
    for number, layer in enumerate(layers):
        if number and self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        x, *states = _run(self, handle, x, first, layer, number, packing)
        last.append(states)
    h, *c = map(torch.cat, zip(*last, strict=True))
    if isinstance(input, PackedSequence):
        outputs: Any = input._replace(data=packing.pack(x))
    else:
        outputs = x.transpose(0, 1) if self.batch_first else x
    return outputs, ((h, *c) if is_lstm else h)


def _stays_wide(self: nn.RNNBase, x: Tensor) -> bool:
    """Returns whether PyTorch's own layer stays in float32 under autocast."""
    return isinstance(self, nn.GRU) and x.device.type == "cpu" and x.dtype == torch.float32


def _layers_of(
    self: nn.RNNBase,
    handle: LayerState,
    input: Tensor | PackedSequence,
    tokens: Tensor,
    hx: Any,
) -> list[Layer]:
    """Returns the layers with the sites of their parameters.

    They are kept for later calls with such an input and no first states, where the input has a row
    for each sample, and is no DTensor.

    Raises:
        ValueError: parameters are DTensors.
    """
    is_packed = isinstance(input, PackedSequence)
    key = (Layer, is_packed, tokens.ndim, tokens.dtype, autocast_of(tokens))
    kept: Any = handle.sites.get(key)
    if kept is not None and hx is None and type(tokens) is Tensor:
        place = 0 if self.batch_first else 1
        count = int(input.batch_sizes[0]) if is_packed else tokens.shape[place]
        if count == handle.private_step.batch_size:
            return kept
    sequences = _sequences(self, handle, input, hx)
    mode, layers = mode_of(self), []
    for number in range(self.num_layers):
        parts = []
        for direction in ("", "_reverse")[: 2 if self.bidirectional else 1]:
            names = [f"{kind}_l{number}{direction}" for kind in KINDS]
            tensor_parallel.refuse_distributed(handle, *[getattr(self, n, None) for n in names])
            sites = (
                handle.site(Linear, tokens, sequences, (names[0], names[1])),
                handle.site(Enter, tokens, sequences, (names[2], names[3])),
                handle.site(Enter, tokens, sequences, (names[4], "")),
            )  # fmt: skip
            for site in sites:
                site.is_recurrent = True
            parts.append(Part(names, *sites))
        layers.append(Layer(mode, parts))
    if hx is None and sequences.kind == "dimension":
        handle.sites[key] = layers
    return layers


def _sequences(
    self: nn.RNNBase, handle: LayerState, input: Tensor | PackedSequence, hx: Any
) -> Layout:
    """Returns where the samples are in [T, N, ..] of N sequences.

    Raises:
        ValueError: it is called in a way in which a sequence is not of one sample.
    """
    with torch.no_grad():  # autograd saves the same as in a call that finds the layers kept
        tensors = handle.tensors((input, hx))
    tensor_parallel.refuse_distributed(handle, *tensors)
    layouts = handle.layouts_of(tensors)
    place = 0 if isinstance(input, PackedSequence) or self.batch_first else 1
    for x, layout, dim in zip(tensors, layouts, (place, 1, 1), strict=False):
        if x.dim() < 3 or layout.kind == "shared" or layout.dim != dim:
            where = "[batch, time, features]" if self.batch_first else "[time, batch, features]"
            raise ValueError(
                f"{handle.title(self)} is given a tensor of "
                f"shape {tuple(x.shape)} with its samples as {layout}: give it {where}, as "
                f"batch_first={self.batch_first} says, and states [layers, batch, features], with "
                "a sequence and a state of its own for every sample (x.expand)"
            )
    return Layout(layouts[0].kind, 1)


def _run(
    self: nn.RNNBase,
    handle: LayerState,
    x: Tensor,
    first: tuple[Tensor, ...],
    layer: Layer,
    number: int,
    packing: Packing | None,
) -> tuple[Tensor, ...]:
    """Returns the states of all time steps [T, N, D·H] in one layer, and the last ones [D, N, H].

    Args:
        x: [T, N, ..].
        first: the first states of all layers, [layers·D, N, ..]; empty: zeros.
        number: the layer's.
    """
    gates: list[Tensor] = []
    weights: list[Any] = []
    private_step: Any = handle.private_step
    own, parameters = self.__dict__, self._parameters
    for part in layer.parts:
        values: list[Any] = []
        for name in part.names:
            value: Any = own[name] if name in own else parameters.get(name)  # FSDP1 lays it over
            values.append(None if value is None else value.detach())
        gates.append(part.input.use(private_step, x, values[0], values[1]))
        weights.append(tuple(values[2:]))
    run = Run(layer, private_step, packing)
    run.announce(gates[0], weights)
    count = len(gates)
    together = gates[0] if count == 1 else torch.cat(gates, 2)
    enter, leave = (Enter.apply, Leave.apply) if transforms_run() else (ENTER, LEAVE)
    together = enter(together, run, weights, *map(private_step.trigger, layer.records))
    if first:
        own_states = slice(number * count, (number + 1) * count)
        states = [s[own_states].to(together.dtype) for s in first]
    else:
        count_of_states = 2 if layer.mode == "LSTM" else 1
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[:count_of_states]
        states = [together.new_zeros(count, x.shape[1], width) for width in widths]
    h, c = (*map(Tensor.detach, states), None)[:2]
    if packing is None:
        return leave(run, h, c, *kernel.run(layer.mode, together, states, weights))
    packed, states = packing.pack(together), reordered(states, packing.order)
    y, *last = kernel.run(layer.mode, packed, states, weights, packing.batch_sizes)
    return leave(run, h, c, packing.pad(y), *reordered(last, packing.places))
