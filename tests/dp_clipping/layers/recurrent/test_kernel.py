"""The kernel, given the gates' share of the inputs, computes what a layer does of the inputs."""

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.layers.recurrent import kernel

T, N, P, H = 5, 3, 4, 6
LAYERS = {
    "lstm": (nn.LSTM, {}),
    "lstm, projected": (nn.LSTM, dict(proj_size=2, bidirectional=True)),
    "gru": (nn.GRU, dict(bidirectional=True)),
    "gru, no bias": (nn.GRU, dict(bias=False)),
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, dict(nonlinearity="relu", bidirectional=True)),
}


def weights_of(layer: nn.RNNBase) -> tuple[list[Tensor], list[Tensor | None], list]:
    """Returns W_ih and b_ih of each direction, and what the kernel takes."""
    own = [
        {n: getattr(layer, f"{n}_l0{end}", None) for n in
         ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")}
        for end in ("", "_reverse")[: 2 if layer.bidirectional else 1]
    ]  # fmt: skip
    own = [{n: None if w is None else w.detach() for n, w in one.items()} for one in own]
    hidden = [(w["weight_hh"], w["bias_hh"], w["weight_hr"]) for w in own]
    return [w["weight_ih"] for w in own], [w["bias_ih"] for w in own], hidden


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_states_and_gradients_are_those_of_the_layer(name, dtype):
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    layer = kind(P, H, **options).to(dtype)
    x = torch.randn(T, N, P, dtype=dtype, requires_grad=True)
    weights, biases, hidden = weights_of(layer)
    directions = len(weights)
    widths = (layer.proj_size or H, H)[: 2 if name.startswith("lstm") else 1]
    states = [torch.randn(directions, N, w, dtype=dtype) for w in widths]
    expected, last = layer(x, tuple(states) if len(states) == 2 else states[0])
    last = last if isinstance(last, tuple) else (last,)

    gates = torch.cat(
        [nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], 2
    )
    found = kernel.run(layer.mode, gates, states, hidden)
    for mine, theirs in zip(found, (expected, *last), strict=True):
        torch.testing.assert_close(mine, theirs)
    outer = [torch.randn_like(y) for y in found]
    (mine,) = torch.autograd.grad(found, x, outer)
    (theirs,) = torch.autograd.grad((expected, *last), x, outer)
    torch.testing.assert_close(mine, theirs)


def test_what_the_kernel_is_given():
    weights = torch.ones(4, 1), torch.ones(4), None
    found = kernel._flat("LSTM", torch.empty(1, 1, 8), [weights, weights])
    assert [tuple(x.shape) for x in found] == [(4, 8), (4, 1), (4,), (4,)] * 2
    eye, zeros = torch.eye(4), torch.zeros(4, 4)
    assert torch.equal(found[0], torch.cat([eye, zeros], 1))
    assert torch.equal(found[4], torch.cat([zeros, eye], 1))
    assert not found[2].any(), "b_ih is in the gates already"
