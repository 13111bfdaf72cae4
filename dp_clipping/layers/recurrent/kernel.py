"""Runs all time steps of a recurrent layer on PyTorch's own kernel.

The kernel gets the inputs' share of the gates, X = x W_ihᵀ + b_ih, as its input, and the identity
in place of W_ih. Its results are the same, and the gradient of X is G, the gradient at the gates,
from which per-sample gradients are computed. The identity is exact, also in 16 bit; TensorFloat-32,
in which cuDNN multiplies by default, rounds X and G as it would round x and W_ih. It costs two
products with [D·gates·H, D·gates·H] for a layer with D directions.

Autograd saves X, of which cuDNN's backward reads the shape alone: only gradients of weights are
computed from its values, and none of these has one here. So X is not kept where cuDNN runs.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dp_clipping.torch_compat import saves_by_hooks, to_one_buffer_, transforms_run

RUN: dict[str, Any] = {
    "LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu,
}  # fmt: skip
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}

Weights = tuple[Tensor, Tensor | None, Tensor | None]


def run(
    mode: str,
    gates: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Weights],
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns the states of all time steps, [.., D·H], and the last h, and c of an LSTM, [D, N, H].

    Args:
        mode: the mode of `nn.RNNBase`, one of `RUN`.
        gates: X [T, N, D·gates·H], or [tokens, ..] with `batch_sizes`.
        states: first h, and c of an LSTM, [D, N, H], of the gates' dtype.
        weights: W_hh, b_hh and W_hr of each direction, detached.
        batch_sizes: [T] on the host, of packed sequences; see `PackedSequence`.
    """
    device = gates.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return run(mode, gates, states, weights, batch_sizes)
    bidirectional, has_biases = len(weights) == 2, weights[0][1] is not None
    hx: Any = tuple(map(Tensor.contiguous, states)) if mode == "LSTM" else states[0].contiguous()
    rest = (_flat(mode, gates, weights), has_biases, 1, 0.0, True, bidirectional)
    is_read = not _runs_on_cudnn(gates) or saves_by_hooks() or transforms_run()
    with nullcontext() if is_read else not_saving(gates):
        if batch_sizes is None:
            return RUN[mode](gates, hx, *rest, False)
        return RUN[mode](gates, batch_sizes, hx, *rest)


def not_saving(x: Tensor) -> AbstractContextManager[None]:
    """Returns a context in which autograd saves the shape of `x` [..] alone.

    In backward other memory stands in for its values: bytes that were saved beside it, as cuDNN's
    are, if they are enough, or else new memory.
    """
    place, shape, like = x.data_ptr(), x.shape, x.new_empty(0)
    beside: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor | torch.Size:
        if saved.data_ptr() == place and saved.shape == shape:
            return shape
        if saved.dtype == torch.uint8:
            beside.append(saved)
        return saved

    def unpack(saved: Tensor | torch.Size) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        needed = saved.numel() * like.element_size()
        for memory in beside:
            if memory.numel() >= needed:
                return memory[:needed].view(like.dtype).view(saved)
        return like.new_empty(saved)

    return saved_tensors_hooks(pack, unpack)


def _runs_on_cudnn(x: Tensor) -> bool:
    return x.is_cuda and torch.backends.cudnn.is_acceptable(x)


def _flat(mode: str, gates: Tensor, weights: Sequence[Weights]) -> list[Tensor]:
    """Returns the weights of all directions, the identity first, as kernels take them."""
    found = []
    for n, (weight, bias, projection) in enumerate(weights):
        rows = weight.shape[0]
        identity = gates.new_zeros(rows, gates.shape[-1])
        identity.diagonal(n * rows).fill_(1)
        given = (weight, None if bias is None else torch.zeros_like(bias), bias, projection)
        found.append(identity)
        for x in given:
            if x is not None:
                found.append(x.to(gates.dtype))
    weight, _, projection = weights[0]
    if _runs_on_cudnn(gates):
        proj_size = 0 if projection is None else projection.shape[0]
        hidden_size = weight.shape[0] // GATES[mode]
        found = [x.clone() for x in found]  # they get other memory, and parameters keep theirs
        to_one_buffer_(found, mode, gates.shape[-1], hidden_size, proj_size, len(weights) == 2)
    return found
