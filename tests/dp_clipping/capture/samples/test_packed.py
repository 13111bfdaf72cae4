"""Packed sequences are opened to rows of samples, and packed again."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from dp_clipping.capture.samples.packed import Sequences, opened, packed, packed_in, repacking
from dp_clipping.torch_compat import hooks_of
from tests.dp_clipping.conftest import private
from tests.support.engine import build, fixed
from tests.support.turns import in_turn

LENGTHS = [2, 4, 2, 1]


def rows(lengths: list[int] = LENGTHS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(n, 3, generator=draw) for n in lengths]


def assert_same(one: PackedSequence, other: PackedSequence) -> None:
    for x, y in zip(one, other, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_there_and_back(is_sorted, batch_first):
    samples = rows(sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS)
    given = rnn.pack_sequence(samples, enforce_sorted=is_sorted)
    tree = {"x": [given, 1], "y": torch.ones(4)}
    found = opened(tree, batch_first)
    x, lengths = found["x"][0]
    for n, sample in enumerate(samples):
        row = x[n] if batch_first else x[:, n]
        assert torch.equal(row[: len(sample)], sample)
        assert not row[len(sample) :].any()
    assert lengths.tolist() == [len(sample) for sample in samples]
    assert found["y"] is tree["y"]
    assert_same(packed(found, batch_first, [given])["x"][0], given)
    again = packed(found, batch_first)["x"][0]
    assert_same(again, rnn.pack_sequence(samples, enforce_sorted=False))
    assert packed_in(tree) == [given]


def test_gradients_come_through():
    data = torch.randn(9, 3, requires_grad=True)
    given = rnn.pack_sequence(rows(), enforce_sorted=False)._replace(data=data)
    back = packed(opened((given,), True), True, [given])[0]
    back.data.mul(torch.arange(27.0).view(9, 3)).sum().backward()
    assert torch.equal(data.grad, torch.arange(27.0).view(9, 3))


@pytest.mark.parametrize("batch_first", [True, False])
def test_no_samples(batch_first):
    data, none = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    empty = PackedSequence(data, none, none, none)
    found = opened((empty,), batch_first)[0]
    assert found.x.shape == ((0, 1, 3) if batch_first else (1, 0, 3))
    assert found.lengths.tolist() == []
    assert_same(packed((found,), batch_first)[0], PackedSequence(data, none))


class Doubles(nn.Module):
    def forward(self, given: PackedSequence) -> PackedSequence:
        assert isinstance(given, PackedSequence)
        return given._replace(data=2 * given.data)


def test_a_network_is_given_packed_ones_and_its_outputs_keep_their_length():
    network, given = Doubles(), rnn.pack_sequence(rows(), enforce_sorted=False)
    sequences = opened(given, True)
    with repacking(network, True):
        y = network(Sequences(sequences.x[2:], sequences.lengths[2:]))
        assert_same(network(given), given._replace(data=2 * given.data))
    assert torch.equal(y.x, 2 * sequences.x[2:])  # of 4 time steps, though the longest has 2
    assert not hooks_of(network)


class Net(nn.Module):
    """Packed sequences, and a label for each, to packed outputs or the outputs of a head."""

    def __init__(self, returns_packed: bool):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, bidirectional=True), nn.Linear(8, 2)
        self.returns_packed = returns_packed

    def forward(self, x: PackedSequence) -> Tensor | PackedSequence:
        y, (h, _) = self.lstm(x)
        return y if self.returns_packed else self.head(h.transpose(0, 1).flatten(1))


class Losses:
    reduction = "mean"

    def __init__(self, mixes: bool = False):
        self.mixes = mixes

    def __call__(self, y: Tensor | PackedSequence, labels: Tensor) -> Tensor:
        if isinstance(y, PackedSequence):
            y = rnn.pad_packed_sequence(y, batch_first=True)[0].sum(1)[:, :2]
        if self.mixes:
            y = y - y.mean(0)
        return nn.functional.cross_entropy(y, labels, reduction=self.reduction)


def collate(samples: list[tuple[Tensor, int]]) -> tuple[PackedSequence, Tensor]:
    xs, labels = zip(*samples, strict=True)
    return rnn.pack_sequence(xs, enforce_sorted=False), torch.tensor(labels)


def make(returns_packed: bool, mixes: bool = False, batch_first: bool = True) -> tuple:
    torch.manual_seed(0)
    network = Net(returns_packed)
    data = [(x, n % 2) for n, x in enumerate(rows([1 + n % 5 for n in range(24)]))]
    run = build(
        module=network, criterion=Losses(mixes), batch_first=batch_first, noise_generator=fixed(0),
        data_loader=DataLoader(data, batch_size=2, collate_fn=collate), accountant="pld",
    )  # fmt: skip
    return run.engine, run.model, run.optimizer, run.criterion, run.loader


@pytest.mark.parametrize(("returns_packed", "batch_first"), in_turn([True, False], [True, False]))
def test_training_on_packed_batches(returns_packed, batch_first):
    """Poisson batches of them, empty ones too, and what `engine.check` says of one."""
    engine, model, optimizer, criterion, loader = make(returns_packed, batch_first=batch_first)
    sizes = []
    for _ in range(2):
        for x, labels in loader:
            sizes.append(len(labels))
            optimizer.zero_grad()
            criterion(model(x), labels).backward()
            assert len(model.per_sample_gradient_norms) == len(labels)
            optimizer.step()
    assert {0, 1} < set(sizes)
    optimizer.zero_grad()
    samples = [(x, 1) for x in rows([3, 1, 5, 3, 2])]
    report = engine.check(model, collate(samples))
    assert report.ok, report


@pytest.mark.parametrize("returns_packed", [True, False])
def test_losses_that_mix_samples_are_refused(returns_packed):
    _, model, _, criterion, _ = make(returns_packed, mixes=True)
    x, labels = collate([(x, n % 2) for n, x in enumerate(rows())])
    with warnings.catch_warnings(), pytest.raises(ValueError, match="depends on"):
        criterion(model(x), labels)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.lstm = nn.Parameter(torch.ones(3)), nn.LSTM(3, 2, batch_first=True)

    def forward(self, given: PackedSequence) -> Tensor:
        given = given._replace(data=given.data * self.scale)
        return rnn.pad_packed_sequence(self.lstm(given)[0], batch_first=True, total_length=4)[0]


@pytest.mark.parametrize("is_inner", [True, False])
def test_a_module_under_vmap_refuses_packed_sequences(is_inner):
    network: nn.Module = nn.Sequential(Scaled()) if is_inner else Scaled()
    model = private(network)
    with pytest.raises(ValueError, match=r"\(Scaled\) computes with parameters .* give it padded"):
        model(rnn.pack_sequence(rows(), enforce_sorted=False))
