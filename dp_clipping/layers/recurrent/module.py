"""`nn.LSTM`, `nn.GRU` and `nn.RNN`, and Opacus's: their layers, one after the other.

For each of them the inputs' share of the gates is a linear layer on all tokens (see `projection`),
all time steps of all directions are one call of PyTorch's kernel (`kernel`), and `recurrence`
computes the gradients of the weights that the kernel reads. Between layers the padding of packed
sequences is zero, and sequences are in the order of the batch.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.layers import projection, tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, check_size
from dp_clipping.layers.recurrent import kernel
from dp_clipping.layers.recurrent.kinds import mode_of
from dp_clipping.layers.recurrent.packing import Packing
from dp_clipping.layers.recurrent.recurrence import Enter, Leave, Run, Sites
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
    sequences = _sequences(self, handle, input, hx)
    mode = mode_of(self)
    is_lstm = mode == "LSTM"
    first = [] if hx is None else list(hx) if is_lstm else [hx]
    packing = None
    if isinstance(input, PackedSequence):
        packing = Packing.of(input)
        x = packing.pad(input.data)
    else:
        x = input.transpose(0, 1) if self.batch_first else input
    count = 2 if self.bidirectional else 1
    last = []
    for layer in range(self.num_layers):
        if layer and self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        states = [s[layer * count : (layer + 1) * count] for s in first]
        x, *states = _run(self, mode, handle, x, states, layer, sequences, packing)
        last.append(states)
    h, *c = map(torch.cat, zip(*last, strict=True))
    if isinstance(input, PackedSequence):
        outputs: Any = input._replace(data=packing.pack(x))
    else:
        outputs = x.transpose(0, 1) if self.batch_first else x
    return outputs, ((h, *c) if is_lstm else h)


def _sequences(
    self: nn.RNNBase, handle: LayerState, input: Tensor | PackedSequence, hx: Any
) -> Layout:
    """Returns where the samples are in [T, N, ..] of N sequences.

    Raises:
        ValueError: it is called in a way in which a sequence is not of one sample.
    """
    tensors = handle.tensors((input, hx))
    tensor_parallel.refuse_distributed(handle, *tensors)
    layouts = handle.layouts_of(tensors)
    place = 0 if isinstance(input, PackedSequence) or self.batch_first else 1
    for x, layout, dim in zip(tensors, layouts, (place, 1, 1), strict=False):
        check_size(x, layout, handle, handle.private_step.batch_size)
        if x.dim() < 3 or layout.kind == "shared" or layout.dim != dim:
            where = "[batch, time, features]" if self.batch_first else "[time, batch, features]"
            raise ValueError(
                f"{handle.name or 'the network'} ({type(self).__name__}) is given a tensor of "
                f"shape {tuple(x.shape)} with its samples as {layout}: give it {where}, as "
                f"batch_first={self.batch_first} says, and states [layers, batch, features], with "
                "a sequence and a state of its own for every sample (x.expand)"
            )
    return Layout(layouts[0].kind, 1)


def _run(
    self: nn.RNNBase,
    mode: str,
    handle: LayerState,
    x: Tensor,
    states: list[Tensor],
    layer: int,
    sequences: Layout,
    packing: Packing | None,
) -> tuple[Tensor, ...]:
    """Returns the states of all time steps [T, N, D·H] in one layer, and the last ones [D, N, H].

    Args:
        x: [T, N, ..].
        states: the first ones, [D, N, ..]; empty: zeros.
    """
    gates: list[Tensor] = []
    weights: list[Any] = []
    sites: list[Sites] = []
    private_step: Any = handle.private_step
    for direction in ("", "_reverse")[: 2 if self.bidirectional else 1]:
        names = [f"{kind}_l{layer}{direction}" for kind in KINDS]
        values: list[Any] = [getattr(self, name, None) for name in names]
        tensor_parallel.refuse_distributed(handle, *values)
        values = [None if value is None else value.detach() for value in values]
        weight_ih, bias_ih, *hidden = values
        with _autocast_of(self, x):
            found = projection.project(
                handle, x, sequences, weight_ih, bias_ih, names=(names[0], names[1])
            )
        gates.append(found)
        weights.append(tuple(hidden))
        sites.append((
            handle.site(Enter, found, sequences, (names[2], names[3])),
            handle.site(Enter, found, sequences, (names[4], "")),
        ))  # fmt: skip
    run = Run(mode, sites, private_step, packing)
    run.announce(gates[0], weights)
    together = gates[0] if len(gates) == 1 else torch.cat(gates, 2)
    enter, leave = (Enter.apply, Leave.apply) if transforms_run() else (ENTER, LEAVE)
    together = enter(together, run, *chain.from_iterable(weights), *run.triggers)
    if not states:
        count = 2 if mode == "LSTM" else 1
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[:count]
        states = [together.new_zeros(len(gates), x.shape[1], width) for width in widths]
    states = [s.to(together.dtype) for s in states]
    last = _all_steps(mode, together, states, weights, packing)
    h, c = (*map(Tensor.detach, states), None)[:2]
    return leave(run, h, c, *last)


def _all_steps(
    mode: str,
    gates: Tensor,
    states: list[Tensor],
    weights: list[kernel.Weights],
    packing: Packing | None,
) -> tuple[Tensor, ...]:
    """Returns the results of `kernel.run` on [T, N, ..], in the order of the batch."""
    if packing is None:
        return kernel.run(mode, gates, states, weights)
    states = list(map(packing.by_length, states))
    y, *last = kernel.run(mode, packing.pack(gates), states, weights, packing.batch_sizes)
    return packing.pad(y), *map(packing.by_batch, last)


def _autocast_of(self: nn.RNNBase, x: Tensor) -> AbstractContextManager:
    """Returns a context without autocast where PyTorch's own layer stays in float32."""
    if isinstance(self, nn.GRU) and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.autocast("cpu", enabled=False)
    return nullcontext()
