"""`nn.LSTM`, `nn.GRU` and `nn.RNN`: their layers and directions, one after the other.

For each of them the input's share of the gates is a linear layer on all tokens (see `projection`),
and `Recurrence` does the rest. What a packed sequence leaves out is zero in between, and sequences
are in the order of the batch.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dp_clipping.layers import projection, tensor_parallel
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, check_size
from dp_clipping.layers.recurrent.cells import Cell, Gru, Lstm, Rnn
from dp_clipping.layers.recurrent.recurrence import Recurrence, Steps
from dp_clipping.torch_compat import never_compiled


@never_compiled
def forward(self: nn.RNNBase, input: Tensor | PackedSequence, hx: Any = None) -> Any:
    """Computes the module; as in PyTorch, a packed sequence is returned for one that is given."""
    handle: Any = self._private
    if handle.private_step is None:
        return type(self).forward(self, input, hx)
    sequences = _sequences(self, handle, input, hx)
    is_lstm = isinstance(self, nn.LSTM)
    first = [None, None] if hx is None else list(hx) if is_lstm else [hx, None]
    if isinstance(input, PackedSequence):
        x, lengths = pad_packed_sequence(input, batch_first=True)
        order, places = input.sorted_indices, input.unsorted_indices
        running = input.batch_sizes.tolist()
    else:
        x, order, places = input if self.batch_first else input.transpose(0, 1), None, None
        running = [x.shape[0]] * x.shape[1]
    last: list[list[Any]] = [[], []]
    directions = ("", "_reverse") if self.bidirectional else ("",)
    for layer in range(self.num_layers):
        if layer and self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        found = []
        for direction in directions:
            steps = Steps(running, bool(direction), order, places)
            number = len(last[0])
            states = [None if s is None else s[number] for s in first]
            y, *states = _run(self, handle, x, states, f"_l{layer}{direction}", steps, sequences)
            found.append(y)
            for of_all, state in zip(last, states, strict=True):
                of_all.append(state)
        x = found[0] if len(found) == 1 else torch.cat(found, 2)
    h, c = torch.stack(last[0]), torch.stack(last[1]) if is_lstm else None
    if isinstance(input, PackedSequence):
        outputs: Any = _packed_like(input, x, lengths)
    else:
        outputs = x if self.batch_first else x.transpose(0, 1)
    return outputs, ((h, c) if is_lstm else h)


def _packed_like(packed: PackedSequence, y: Tensor, lengths: Tensor) -> PackedSequence:
    """Returns y [N, T, ..], in the order of the batch, packed as another sequence is."""
    if packed.sorted_indices is not None:
        y = y.index_select(0, packed.sorted_indices)
        lengths = lengths[packed.sorted_indices.cpu()]
    return packed._replace(data=pack_padded_sequence(y, lengths, batch_first=True).data)


def _sequences(
    self: nn.RNNBase, handle: LayerState, input: Tensor | PackedSequence, hx: Any
) -> Layout:
    """Returns where the samples are among N sequences.

    Raises:
        ValueError: it is called in a way in which a sequence is not of one sample.
    """
    tensors = handle.tensors((input, hx))
    tensor_parallel.refuse_distributed(handle, *tensors, *self.parameters())
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
    return Layout(layouts[0].kind)


def _run(
    self: nn.RNNBase,
    handle: LayerState,
    x: Tensor,
    states: list[Tensor | None],
    suffix: str,
    steps: Steps,
    sequences: Layout,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the states of all time steps [N, T, H] in one layer and direction, and the last."""
    kinds = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
    names = [kind + suffix for kind in kinds]
    values: list[Any] = [getattr(self, name, None) for name in names]
    values = [None if value is None else value.detach() for value in values]
    weight_ih, bias_ih, *hidden = values
    with _autocast_of(self, x):
        gates = projection.project(
            handle, x, sequences, weight_ih, bias_ih, names=(names[0], names[1])
        )
    width = self.proj_size or self.hidden_size
    h = gates.new_zeros(len(x), width) if states[0] is None else states[0]
    c = states[1]
    if c is None and isinstance(self, nn.LSTM):
        c = gates.new_zeros(len(x), self.hidden_size)
    before = torch.empty((*gates.shape[:2], width), dtype=gates.dtype, device="meta")
    inner = before.new_empty((*gates.shape[:2], self.hidden_size))
    uses = (
        projection.weight_use(handle, names[2], before, hidden[0]),
        projection.bias_use(handle, names[3]),
        projection.weight_use(handle, names[4], inner, hidden[2]),
    )
    slots, takes = zip(*uses, strict=True)
    return Recurrence.apply(
        gates, h, c, *hidden, *slots, _cell_of(self), steps, takes, sequences,
        handle.private_step.batch_size,
    )  # fmt: skip


def _cell_of(self: nn.RNNBase) -> Cell:
    if isinstance(self, nn.LSTM):
        return Lstm()
    return Gru() if isinstance(self, nn.GRU) else Rnn(str(self.nonlinearity))


def _autocast_of(self: nn.RNNBase, x: Tensor) -> AbstractContextManager:
    """Returns what turns autocast off where PyTorch's own does not heed it."""
    if isinstance(self, nn.GRU) and x.device.type == "cpu":
        return torch.autocast("cpu", enabled=False)
    return nullcontext()
