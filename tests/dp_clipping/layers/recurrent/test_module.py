"""Recurrent layers and cells among others; by themselves they are in `tests/dp_clipping/ops`."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from tests.dp_clipping.conftest import (
    MODES,
    assert_close,
    assert_exact,
    clipped_sums,
    criterion_of,
    gradients_of,
    private,
    unchecked,
)
from tests.support import zoo

P, H, T = 4, 5, 6
LENGTHS = torch.tensor([3, 6, 1, 4])


def tied() -> nn.Module:
    """The weights of one layer's states and inputs are another layer's, and a linear one's."""
    net = zoo.Net(
        lambda net, x: net.c(net.b(net.a(x)[0])[0]),
        a=nn.LSTM(P, P, batch_first=True), b=nn.LSTM(P, P, batch_first=True),
        c=nn.Linear(P, 4 * P, bias=False),
    )  # fmt: skip
    net.b.weight_hh_l0, net.c.weight = net.a.weight_hh_l0, net.a.weight_ih_l0
    return net


def characters() -> nn.Module:
    """An LSTM on all words of all samples, whose last states are flattened in dimension 1."""
    return zoo.Net(
        lambda net, x: net.b(net.a(x.unflatten(2, (2, 2)).flatten(0, 1))[1][0][0]).unflatten(
            0, x.shape[:2]
        ),
        a=nn.LSTM(2, H, batch_first=True), b=nn.Linear(H, 3),
    )  # fmt: skip


def seq2seq() -> nn.Module:
    """A decoder that starts where an encoder has ended."""
    return zoo.Net(
        lambda net, x: net.b(x, net.a(x)[1])[0],
        a=nn.LSTM(P, H, batch_first=True), b=nn.LSTM(P, H, batch_first=True),
    )  # fmt: skip


def cell_of_words() -> nn.Module:
    """A cell on all words of all samples, flattened."""

    def forward(net, x):
        state = None
        for one in x.unflatten(2, (2, 2)).flatten(0, 1).unbind(1):
            state = net.cell(one, state)
        return state.unflatten(0, x.shape[:2])

    return zoo.Net(forward, cell=nn.GRUCell(2, H))


def tied_cells() -> nn.Module:
    """The weight of states is that of a linear layer and of another cell too."""
    net = zoo.Net(
        lambda net, x: net.c(net.b(net.a(x[:, 0]), net.a(x[:, 1], x[:, 2]))),
        a=nn.RNNCell(P, P), b=nn.RNNCell(P, P), c=nn.Linear(P, P),
    )  # fmt: skip
    net.b.weight_hh = net.c.weight = net.a.weight_hh
    net.a.bias_ih.requires_grad_(False)
    net.b.weight_ih.requires_grad_(False)
    return net


def beside_a_parameter() -> nn.Module:
    """Its own parameter sends the network under vmap, as taggers with a CRF have one."""
    return zoo.Net(
        lambda net, x: net.cell(x[:, 1], net.cell(net.lstm(x)[0][:, 0]))[0] * net.scale,
        lstm=nn.LSTM(P, P, batch_first=True), cell=nn.LSTMCell(P, P),
        scale=nn.Parameter(torch.ones(P)),
    )  # fmt: skip


NETWORKS = (tied, characters, seq2seq, cell_of_words, tied_cells, beside_a_parameter)


@pytest.mark.parametrize("build", NETWORKS)
@pytest.mark.parametrize("mode", MODES[1:])
def test_other_networks(build, mode):
    network = zoo.seeded(build).double()
    x = torch.randn(4, T, P, dtype=torch.float64)
    assert_exact(network, (x, torch.randn_like(network(x))), mode)


class Pooled(nn.Module):
    """Token ids, packed, and a masked mean of what is padded to the longest of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, P)
        self.lstm, self.head = nn.LSTM(P, H, batch_first=True), nn.Linear(H, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(ids)
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
        y, _ = rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        y = torch.tanh(self.head(y))
        return (y * (torch.arange(y.shape[1]) < lengths[:, None])[..., None]).sum(1)


def pooled_inputs() -> dict[str, Tensor]:
    return {"ids": torch.randint(20, (4, T)), "lengths": LENGTHS}


def test_a_padded_length_that_depends_on_the_batch():
    batch = pooled_inputs(), torch.randn(4, 3, dtype=torch.float64)
    assert_exact(Pooled().double(), batch, "bookkeeping")


def test_a_batch_without_samples():
    model = private(Pooled())
    none = {name: x[:0] for name, x in pooled_inputs().items()}
    criterion_of(model, zoo.product)(model(**none), torch.zeros(0, 3)).backward()
    assert all(not g.any() for g in gradients_of(model).values())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: zoo.Net(lambda net, x: net.a(x)[0], a=nn.LSTM(P, H)),
         r"a \(LSTM\).*\[time, batch, features\]"),
        (lambda: zoo.Net(lambda net, x: x[:, 0] + net.a(torch.ones(1, P)), a=nn.GRUCell(P, P)),
         r"a \(GRUCell\).*\[batch, features\]"),
    ],
    ids=["time for samples", "rows that all samples share"],
)  # fmt: skip
def test_rows_that_are_no_samples_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        unchecked(build())(torch.randn(3, T, P))


class Last(nn.Module):
    """The last states of sequences, packed or not, each of them `repeats` times."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(P, H, 2, batch_first=True, bidirectional=True)
        self.packs, self.repeats = packs, 1

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x, lengths = x.repeat(self.repeats, 1, 1), lengths.repeat(self.repeats)
        if self.packs:
            x = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return self.gru(x)[1][0]


@pytest.mark.parametrize("packs", [False, True])
def test_later_steps_are_as_the_first(packs):
    model, x = unchecked(Last(packs)), torch.randn(4, T, P)
    batch = {"x": x, "lengths": LENGTHS}, torch.randn(4, H)
    fewer = {name: values[:2] for name, values in batch[0].items()}, torch.randn(2, H)
    first, of_fewer = clipped_sums(model, batch), clipped_sums(model, fewer)
    assert_close(clipped_sums(model, batch), first, 0)
    model.network.repeats = 2
    with pytest.raises(ValueError, match="for a batch of 2 samples"):
        model(**fewer[0])
    model.network.repeats = 1
    model.reset_batch_layouts()
    assert_close(clipped_sums(model, fewer), of_fewer, 0)


def test_dropout_between_layers():
    torch.manual_seed(0)
    layer = nn.GRU(P, H, 2, dropout=0.5, batch_first=True)
    network = zoo.Net(lambda net, x: net.layer(x)[0], layer=layer)
    model, x = private(network, "ghost"), torch.randn(4, T, P)
    outputs = model(x)
    assert layer.dropout == 0.5
    assert not torch.allclose(outputs, model(x))


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_inputs_are_multiplied_in_the_precision_of_recurrent_layers(precision, monkeypatch):
    """On a GPU, where PyTorch multiplies other layers' inputs in another one by default."""
    net = zoo.Net(
        lambda net, x: net.b(net.a(x)[0]), a=nn.LSTM(P, H, batch_first=True), b=nn.Linear(H, 3)
    )
    model, seen = private(net, "bookkeeping"), {}
    matmul, rnn_of_cudnn = torch.backends.cuda.matmul, torch.backends.cudnn.rnn

    def linear(x, weight, bias=None, compute=nn.functional.linear):
        seen[weight.shape] = matmul.fp32_precision
        return compute(x, weight, bias)

    others, before = matmul.fp32_precision, rnn_of_cudnn.fp32_precision
    try:
        rnn_of_cudnn.fp32_precision = precision
        model.skip_checks()
        monkeypatch.setattr(nn.functional, "linear", linear)
        clipped_sums(model, (torch.randn(3, T, P), torch.randn(3, T, 3)))
    finally:
        rnn_of_cudnn.fp32_precision = before
    assert seen == {(4 * H, P): precision, (3, H): others}
    assert matmul.fp32_precision == others != "tf32"
