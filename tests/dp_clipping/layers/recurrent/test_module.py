"""LSTM, GRU and RNN: outputs are PyTorch's, and gradients those of one sample at a time."""

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from dp_clipping.layers.recurrent import kernel
from tests.dp_clipping.conftest import (
    MODES,
    assert_exact,
    count_calls,
    criterion_of,
    gradients_of,
    private,
    private_loss,
    unchecked,
)
from tests.dp_clipping.step.test_on_gpu import compare_with_oracle
from tests.support import zoo

P, H, T = 4, 5, 6
LENGTHS = torch.tensor([3, 6, 1, 4])


class Recurrent(nn.Module):
    """A layer between a linear one and outputs [B, ..] of all that it returns."""

    def __init__(self, kind: type, is_packed: bool, has_states: bool, **options) -> None:
        super().__init__()
        self.project, self.layer = nn.Linear(P, P), kind(P, H, **options)
        self.is_packed, self.has_states = is_packed, has_states

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        layer, length = self.layer, x.shape[1]
        x = torch.tanh(self.project(x))
        states = self.states(x) if self.has_states else None
        x = x if layer.batch_first else x.transpose(0, 1)
        options = {"batch_first": layer.batch_first}
        if self.is_packed:
            x = rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False, **options)
        y, last = layer(x, states)
        if self.is_packed:
            y, _ = rnn.pad_packed_sequence(y, total_length=length, **options)
        y = y if layer.batch_first else y.transpose(0, 1)
        last = last if isinstance(last, tuple) else (last,)
        return torch.cat([y.flatten(1), *(s.transpose(0, 1).flatten(1) for s in last)], 1)

    def states(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        layer = self.layer
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        widths = (layer.proj_size or H, H)
        found = [x[:, 0, :1].sin().expand(count, len(x), width) for width in widths]
        return tuple(found) if isinstance(layer, nn.LSTM | DPLSTM) else found[0]


CASES = {
    "lstm": (nn.LSTM, False, False, {}),
    "lstm, all": (
        nn.LSTM, True, True, dict(num_layers=2, bidirectional=True, batch_first=True, proj_size=3),
    ),
    "lstm, projected, no bias": (nn.LSTM, False, True, dict(proj_size=2, bias=False)),
    "lstm, packed": (nn.LSTM, True, False, dict(batch_first=True)),
    "gru, all": (nn.GRU, True, True, dict(num_layers=2, bidirectional=True)),
    "gru, no bias": (nn.GRU, False, False, dict(bias=False, batch_first=True)),
    "rnn, all": (nn.RNN, True, True, dict(num_layers=2, bidirectional=True, batch_first=True)),
    "rnn, relu": (nn.RNN, True, False, dict(nonlinearity="relu")),
    "opacus lstm": (
        DPLSTM, False, True, dict(num_layers=2, bidirectional=True, batch_first=True),
    ),
    "opacus lstm, packed": (DPLSTM, True, False, dict(num_layers=2, bidirectional=True)),
    "opacus gru, packed": (DPGRU, True, True, dict(bias=False, batch_first=True)),
    "opacus rnn": (DPRNN, False, False, dict(bidirectional=True)),
    "opacus rnn, relu, packed": (DPRNN, True, True, dict(nonlinearity="relu")),
}  # fmt: skip


def network_and_batch(name: str, dtype: torch.dtype = torch.float64) -> tuple:
    torch.manual_seed(0)
    kind, is_packed, has_states, options = CASES[name]
    network = Recurrent(kind, is_packed, has_states, **options).to(dtype)
    inputs = {"x": torch.randn(len(LENGTHS), T, P, dtype=dtype), "lengths": LENGTHS}
    with torch.no_grad():
        outputs = network(**inputs)
    return network, (inputs, torch.randn_like(outputs)), outputs


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_pytorchs(name):
    network, batch, expected = network_and_batch(name, torch.float32)
    model = unchecked(network)
    assert "recurrent" in [handle.kind for handle in model.capture.handles]
    torch.testing.assert_close(model(**batch[0]), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def in_float64():
    """Opacus's layers return the last states of packed sequences in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_gradients(name, mode):
    network, batch, _ = network_and_batch(name)
    assert_exact(network, batch, mode)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_in_bfloat16(kind):
    torch.manual_seed(0)
    network = zoo.Net(lambda net, x: net.layer(x)[0], layer=kind(P, H, 2, batch_first=True))
    batch = torch.randn(4, T, P).bfloat16(), torch.randn(4, T, H).bfloat16()
    assert_exact(network.bfloat16(), batch, "bookkeeping", 6e-2)


def tied() -> nn.Module:
    """The weights of one layer's states and inputs are another layer's, and a linear one's."""
    net = zoo.Net(
        lambda net, x: net.c(net.b(net.a(x)[0])[0]),
        a=nn.LSTM(P, P, batch_first=True), b=nn.LSTM(P, P, batch_first=True),
        c=nn.Linear(P, 4 * P, bias=False),
    )  # fmt: skip
    net.b.weight_hh_l0, net.c.weight = net.a.weight_hh_l0, net.a.weight_ih_l0
    return net


def reused() -> nn.Module:
    return zoo.Net(lambda net, x: net.a(net.a(x)[0])[0], a=nn.GRU(P, P, batch_first=True))


def frozen() -> nn.Module:
    net = zoo.Net(
        lambda net, x: net.b(net.a(x).transpose(1, 2).contiguous().transpose(1, 2))[0],
        a=nn.Linear(P, P), b=nn.LSTM(P, P, proj_size=2, batch_first=True),
    )  # fmt: skip
    for name in ("weight_hh_l0", "bias_ih_l0"):
        getattr(net.b, name).requires_grad_(False)
    return net


def characters() -> nn.Module:
    """An LSTM on all words of all samples, whose last states are flattened in dimension 1."""
    return zoo.Net(
        lambda net, x: net.b(net.a(x.unflatten(2, (2, 2)).flatten(0, 1))[1][0][0]).unflatten(
            0, x.shape[:2]
        ),
        a=nn.LSTM(2, H, batch_first=True), b=nn.Linear(H, 3),
    )  # fmt: skip


def with_a_parameter_beside_it() -> nn.Module:
    """Returns a network whose own parameter sends it under vmap, as taggers with a CRF have."""
    return zoo.Net(
        lambda net, x: (net.b(net.a(x)[0]) * net.scale).sum(1),
        a=nn.LSTM(P, H, batch_first=True), b=nn.Linear(H, 3), scale=nn.Parameter(torch.ones(3)),
    )  # fmt: skip


def seq2seq() -> nn.Module:
    """A decoder that starts where an encoder has ended."""
    return zoo.Net(
        lambda net, x: net.b(x, net.a(x)[1])[0],
        a=nn.LSTM(P, H, batch_first=True), b=nn.LSTM(P, H, batch_first=True),
    )  # fmt: skip


def checkpointed() -> nn.Module:
    return zoo.Net(
        lambda net, x: checkpoint(net.b, checkpoint(net.a, x, use_reentrant=False)[0],
                                  use_reentrant=False)[0],
        a=nn.LSTM(P, H, 2, proj_size=2, batch_first=True), b=nn.GRU(2, H, batch_first=True),
    )  # fmt: skip


def smallest() -> nn.Module:
    return zoo.Net(lambda net, x: net.a(x[:, :1, :1])[0], a=nn.LSTM(1, 1, batch_first=True))


@pytest.mark.parametrize(
    "build",
    [tied, reused, frozen, characters, with_a_parameter_beside_it, seq2seq, checkpointed, smallest],
)
@pytest.mark.parametrize("mode", MODES[1:])
def test_other_networks(build, mode):
    network = zoo.seeded(build).double()
    x = torch.randn(4, T, P, dtype=torch.float64)
    assert_exact(network, (x, torch.randn_like(network(x))), mode)


def test_a_batch_of_one():
    network = zoo.seeded(seq2seq).double()
    x = torch.randn(1, T, P, dtype=torch.float64)
    assert_exact(network, (x, torch.randn_like(network(x))))


def test_the_kernel_runs_once_for_each_layer(monkeypatch):
    counted = count_calls(kernel.run)
    monkeypatch.setattr(kernel, "run", counted)
    layer = nn.LSTM(P, H, 3, bidirectional=True, batch_first=True)
    model = unchecked(nn.Sequential(layer, Take()))
    for length in (2, 7):
        private_loss(
            model, (torch.randn(4, length, P), torch.ones(4, 1, 1)), zoo.product
        ).backward()
    assert counted.count == 2 * 3


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


class Tagger(Pooled):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), True, enforce_sorted=False
        )
        return self.head(rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


class Sorted(Pooled):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        ordered = lengths.sort(descending=True).values if len(lengths) == 4 else lengths
        packed = rnn.pack_padded_sequence(self.embedding(ids), ordered.cpu(), True)
        return self.head(self.lstm(packed)[1][0][0])


REFUSED = {
    "longest": (Tagger, "total_length=x.shape"),
    "sorted": (Sorted, "enforce_sorted=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused(name):
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        private(build())(**pooled_inputs())


def test_samples_along_time_are_refused():
    model = unchecked(zoo.Net(lambda net, x: net.a(x)[0], a=nn.LSTM(P, H)))
    with pytest.raises(ValueError, match=r"a \(LSTM\).*\[time, batch, features\]"):
        model(torch.randn(3, T, P))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_under_autocast_outputs_are_pytorchs(kind):
    layer, x = kind(P, H, 2, batch_first=True), torch.randn(4, T, P)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = layer(x)[0]
        except RuntimeError as error:
            pytest.skip(f"PyTorch's own layer does not run so on this CPU ({error})")
        model = private(nn.Sequential(layer, Take()))
        outputs = model(x)
        assert outputs.dtype == expected.dtype
        torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)
        criterion_of(model, zoo.product)(outputs, torch.ones_like(outputs)).backward()
    assert model.per_sample_gradient_norms.isfinite().all()


class Take(nn.Module):
    def forward(self, found: tuple) -> Tensor:
        return found[0]


def test_dropout_between_layers():
    torch.manual_seed(0)
    layer = nn.GRU(P, H, 2, dropout=0.5, batch_first=True)
    model, x = private(nn.Sequential(layer, Take()), "ghost"), torch.randn(4, T, P)
    outputs = model(x)
    assert layer.dropout == 0.5
    assert not torch.allclose(outputs, model(x))


TOKENS = ((1, None), (6, None), (6, 1e-3), (24, 1e-5))


def largest_contribution(
    mode: str,
    dtype: torch.dtype,
    kinds: tuple[type, ...] = (nn.LSTM, nn.GRU, nn.RNN),
    tokens: tuple = TOKENS,
) -> float:
    """Returns a sample's largest share, in C: random tokens, and halves that nearly cancel."""
    largest = 0.0
    for kind in kinds:
        for length, epsilon in tokens:
            layer = kind(8, 8, batch_first=True).to(dtype)
            x, y = torch.randn(1, length, 8), torch.randn(1, length, 8)
            if epsilon is not None:
                half = length // 2
                x[:, half:] = x[:, :half]
                y[:, half:] = -y[:, :half] * (1 + epsilon * torch.randn(1, half, 8))
            model = unchecked(nn.Sequential(layer, Take()), mode, max_grad_norm=0.1)
            private_loss(model, (x.to(dtype), y.to(dtype)), zoo.product).backward()
            squares = [p.grad.double().square().sum() for p in layer.parameters()]
            largest = max(largest, torch.stack(squares).sum().sqrt().item() / 0.1)
    return largest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sample_contributes_at_most_c(mode, dtype):
    torch.manual_seed(0)
    assert 0.9 < largest_contribution(mode, dtype) <= 1 + 1e-6


def check_on_kernels() -> None:
    for mode, name in (("flash", "gru_time_major"), ("flash_bookkeeping", "lstm_packed")):
        found = largest_contribution(mode, torch.float32, (nn.GRU,), TOKENS[2:3])
        assert 0.9 < found <= 1 + 1e-6
        compare_with_oracle(zoo.BY_NAME[name], "cpu", torch.float32, mode)


def test_on_kernels_in_the_interpreter(interpreter):
    interpreter.run(check_on_kernels)
