"""All time steps of one direction: states as PyTorch has them, and the factors of both weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.recurrent.cells import Gru, Lstm
from dp_clipping.layers.recurrent.recurrence import Recurrence, Steps

N, T, P, H = 4, 5, 3, 6
LENGTHS = [3, 5, 1, 5]
KINDS = {"lstm": (Lstm, nn.LSTM), "gru": (Gru, nn.GRU)}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_states_and_factors(name, packed, reverse):
    """G of a weight is the gradient of one sequence's loss: y aᵀ over its time steps."""
    torch.manual_seed(0)
    make_cell, kind = KINDS[name]
    layer = kind(P, H, bidirectional=True, batch_first=True).double()
    suffix = "_l0_reverse" if reverse else "_l0"
    w_ih, w, b_ih, b = (
        getattr(layer, n + suffix) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    x, lengths = numbers(N, T, P), LENGTHS if packed else [T] * N
    sequence = rnn.pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False)
    steps = Steps(
        sequence.batch_sizes.tolist(), reverse, sequence.sorted_indices, sequence.unsorted_indices
    )
    if not packed:
        steps = Steps([N] * T, reverse)
    gates = (x @ w_ih.t() + b_ih).detach().requires_grad_()
    h = numbers(N, H).requires_grad_()
    c = numbers(N, H).requires_grad_() if name == "lstm" else None
    slot, found = torch.zeros((), dtype=torch.float64, requires_grad=True), {}
    y, *last = Recurrence.apply(
        gates, h, c, w.detach(), b.detach(), None, slot, slot, None, make_cell(), steps,
        (lambda a, y: found.update(a=a, y=y), lambda y: found.update(bias=y), None),
        Layout(), N,
    )  # fmt: skip

    first = [None if s is None else torch.stack([s, s]) for s in (h, c)]
    given = sequence if packed else x
    theirs, states = layer(given, tuple(first) if c is not None else first[0])
    if packed:
        theirs, _ = rnn.pad_packed_sequence(theirs, batch_first=True)
    half = theirs[..., H:] if reverse else theirs[..., :H]
    torch.testing.assert_close(y, half)
    states = [s[int(reverse)] for s in (states if c is not None else [states])]
    for mine, wanted in zip([s for s in last if s is not None], states, strict=True):
        torch.testing.assert_close(mine, wanted)

    ends = [y, *[s for s in last if s is not None]]
    gradients = [torch.randn_like(e) for e in ends]
    starts = [s for s in (gates, h, c) if s is not None]
    mine = torch.autograd.grad(ends, starts, gradients, allow_unused=True)
    for n in range(N):
        loss = sum((e[n] * g[n]).sum() for e, g in zip([half, *states], gradients, strict=True))
        weight, bias, *of_states = torch.autograd.grad(loss, [w, b, *starts[1:]], retain_graph=True)
        torch.testing.assert_close(found["y"][n].t() @ found["a"][n], weight)
        torch.testing.assert_close(found["bias"][n].sum(0), bias)
        for one, wanted in zip(mine[1:], of_states, strict=True):
            torch.testing.assert_close(one[n], wanted[n])
        assert not mine[0][n, lengths[n] :].any()


def test_time_steps_run_backwards_in_the_other_order():
    steps = Steps([3, 1], reverse=True)
    assert steps.forward() == [(1, 1), (0, 3)]
    assert steps.backward() == [(0, 3), (1, 1)]
