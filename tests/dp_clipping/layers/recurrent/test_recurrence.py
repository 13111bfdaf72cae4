"""The factors that a layer's backward leaves, beside autograd of one sequence at a time."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.recurrent import kernel
from dp_clipping.layers.recurrent.packing import Packing
from dp_clipping.layers.recurrent.recurrence import Enter, Leave, Run
from tests.dp_clipping.layers.recurrent.test_kernel import weights_of

N, T, P, H = 4, 5, 3, 6
LENGTHS = torch.tensor([3, 5, 1, 5])
KINDS = {
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 2}),
    "projected, no bias": (nn.LSTM, {"proj_size": 1, "bias": False}),
    "gru": (nn.GRU, {}),
    "gru, no bias": (nn.GRU, {"bias": False}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
}
HIDDEN = ("weight_hh", "bias_hh", "weight_hr")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Layer:
    """A layer, and what ours leaves of its weights' per-sample gradients, W_ih's apart."""

    def __init__(self, name: str, packed: bool, bidirectional: bool):
        kind, options = KINDS[name]
        self.layer = kind(P, H, bidirectional=bidirectional, **options).double()
        weights, biases, self.hidden = weights_of(self.layer)
        self.directions = len(weights)
        self.x, lengths = numbers(T, N, P), LENGTHS if packed else torch.full((N,), T)
        self.given = rnn.pack_padded_sequence(self.x, lengths, enforce_sorted=False)
        self.packing = Packing.of(self.given) if packed else None
        self.given = self.given if packed else self.x
        widths = (self.layer.proj_size or H, H)[: 2 if kind is nn.LSTM else 1]
        self.first = [numbers(self.directions, N, w).requires_grad_() for w in widths]
        gates = [nn.functional.linear(self.x, w, b) for w, b in zip(weights, biases, strict=True)]
        self.gates = torch.cat(gates, 2).detach().requires_grad_()
        self.found: list[dict] = [{} for _ in weights]

    def ordinary(self) -> list[Tensor]:
        """Returns [T, N, ..] and the last states of PyTorch's own layer."""
        y, last = self.layer(
            self.given, tuple(self.first) if len(self.first) == 2 else self.first[0]
        )
        if self.packing is not None:
            y, _ = rnn.pad_packed_sequence(y)
        return [y, *(last if isinstance(last, tuple) else (last,))]

    def ours(self) -> list[Tensor]:
        takes, slots = [], []
        for found, own in zip(self.found, self.hidden, strict=True):

            def weight(a, y, name, found=found):
                found[name] = y.mT @ a

            def bias(y, found=found):
                found["bias_hh"] = y.sum(1)

            both = [lambda a, y, name=name, take=weight: take(a, y, name) for name in HIDDEN]
            given = (both[0], bias, both[2])
            takes.append(
                tuple(None if w is None else take for w, take in zip(own, given, strict=True))
            )
            slots += [torch.zeros((), dtype=torch.float64, requires_grad=True)] * 3
        self.slot = slots[0]
        run = Run(self.layer.mode, takes, Layout("dimension", 1), N, self.packing)
        gates = Enter.apply(self.gates, run, *(w for own in self.hidden for w in own), *slots)
        states = self.first
        if self.packing is None:
            found = kernel.run(self.layer.mode, gates, states, self.hidden)
        else:
            packing = self.packing
            states = [packing.by_length(s) for s in states]
            y, *last = kernel.run(
                self.layer.mode, packing.pack(gates), states, self.hidden, packing.batch_sizes
            )
            found = (packing.pad(y), *map(packing.by_batch, last))
        h, c = (*(s.detach() for s in self.first), None)[:2]
        return list(Leave.apply(run, h, c, *found))


@pytest.mark.parametrize(
    ("name", "packed", "bidirectional"), list(product(KINDS, [False, True], [False, True]))
)
def test_gradients_of_one_sequence_at_a_time(name, packed, bidirectional):
    torch.manual_seed(0)
    case = Layer(name, packed, bidirectional)
    expected, found = case.ordinary(), case.ours()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)

    outer = [torch.randn_like(y) for y in found]
    starts = [case.gates, *case.first]
    of_starts = torch.autograd.grad(found, starts, outer)
    names = [f"{n}_l0{end}" for end in ("", "_reverse")[: case.directions] for n in HIDDEN]
    names = [n for n in names if hasattr(case.layer, n)]
    mine = {
        f"{n}_l0{end}": g
        for end, one in zip(("", "_reverse"), case.found, strict=False) for n, g in one.items()
    }  # fmt: skip
    assert sorted(mine) == sorted(names)
    for n in range(N):
        loss = sum((y[:, n] * g[:, n]).sum() for y, g in zip(expected, outer, strict=True))
        own = [getattr(case.layer, name) for name in names]
        theirs = torch.autograd.grad(loss, [*own, *case.first], retain_graph=True)
        for name, one in zip(names, theirs, strict=False):
            torch.testing.assert_close(mine[name][n], one)
        for one, wanted in zip(of_starts[1:], theirs[len(own) :], strict=True):
            torch.testing.assert_close(one[:, n], wanted[:, n])
        if packed:
            assert not of_starts[0][LENGTHS[n] :, n].any()


@pytest.mark.parametrize("name", ["lstm", "projected", "gru"])
def test_gradients_of_the_last_states_alone_and_a_second_backward(name):
    torch.manual_seed(0)
    case = Layer(name, True, True)
    expected, found = case.ordinary(), case.ours()
    loss = found[1].sin().sum()
    for _ in range(2):
        case.found[0].clear()
        torch.autograd.grad(loss, case.slot, retain_graph=True, allow_unused=True)
        own = [n for n in HIDDEN if n in case.found[0]]
        parameters = [getattr(case.layer, f"{n}_l0") for n in own]
        theirs = torch.autograd.grad(expected[1].sin().sum(), parameters, retain_graph=True)
        for n, wanted in zip(own, theirs, strict=True):
            torch.testing.assert_close(case.found[0][n].sum(0), wanted)
    assert case.found[0]


def test_one_time_step():
    for kind in KINDS:
        case = Layer(kind, False, True)
        case.x = case.given = case.x[:1]
        case.gates = case.gates[:1].detach().requires_grad_()
        for mine, theirs in zip(case.ours(), case.ordinary(), strict=True):
            torch.testing.assert_close(mine, theirs)
        torch.autograd.grad(case.ours()[0].sum(), case.slot, allow_unused=True)
        assert case.found[1]["weight_hh"].isfinite().all()
