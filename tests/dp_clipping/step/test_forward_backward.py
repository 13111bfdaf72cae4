"""Each forward opens a private step for one backward; a pass that fails leaves none."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from dp_clipping.step.private_step import PrivateStep
from tests.dp_clipping.conftest import assert_exact, private, private_loss
from tests.support import zoo


@pytest.fixture
def model():
    return private(zoo.linear(3, 2), "bookkeeping")


def test_a_forward_opens_a_step_with_its_batch(model):
    model(torch.ones(4, 3))
    first = model.step_state.pending
    assert isinstance(first, PrivateStep)
    assert first.batch_size == 4
    model(torch.ones(5, 3))
    assert model.step_state.pending is not first


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("name", ["transformer", "relative_positions"])
def test_steps_and_models_are_freed(name, mode):
    """Also those whose losses were looked at, and forwards without a backward."""
    case = zoo.BY_NAME[name]
    network = case.build()
    model, batch = private(network, mode), case.batch(4)
    context, reference = weakref.ref(model.step_context), weakref.ref(network)

    def steps() -> int:
        gc.collect()
        every = [x for x in gc.get_objects() if type(x) is PrivateStep]
        return sum(x.context is context() for x in every)

    for _ in range(4):
        private_loss(model, batch, case.per_sample_loss)
        private_loss(model, batch, case.per_sample_loss).backward()
        model.clear_gradients()
        assert steps() == 0
    del model, network
    gc.collect()
    assert reference() is None


def test_a_forward_that_fails_opens_none(model):
    def fail(*_):
        raise ArithmeticError

    for _ in range(2):  # the second batch is the last one that is looked at
        model(torch.ones(4, 3))
    before = model.step_state.pending
    hook = model.network.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(torch.ones(5, 3))
    hook.remove()
    assert model.step_state.pending in (None, before)
    private_loss(model, (torch.ones(5, 3), torch.ones(5, 2)), zoo.product).backward()


def test_an_empty_batch_gives_no_rows_and_zeros(model):
    batch = torch.ones(0, 3), torch.ones(0, 2)
    assert model(batch[0]).shape == (0, 2)
    assert model.step_state.pending.is_empty
    model.clear_gradients()
    private_loss(model, batch, zoo.product).backward()
    assert all((p.grad == 0).all() for p in model.network.parameters())


def test_a_normalisation_that_was_fixed_stays_so():
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    network[1].requires_grad_(False)
    network[1].eval()
    model = private(network, "bookkeeping")
    model(torch.ones(4, 3))
    network.train()
    with pytest.raises(ValueError, match=r"1 .*BatchNorm1d"):
        model(torch.ones(4, 3))


class Packs(nn.Module):
    """As the message of the refusal shows it."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.lstm(packed)[1][0][0]


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("place", ["positional", "keyword", "nested"])
def test_a_packed_sequence_is_refused_with_the_call_that_works(is_sorted, place):
    torch.manual_seed(0)
    lengths = [4, 2, 1] if is_sorted else [2, 4, 1]
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    packed = rnn.pack_sequence(rows, enforce_sorted=is_sorted)
    network = nn.LSTM(3, 2).double()
    args = {"positional": (packed,), "keyword": (), "nested": ([{"x": packed}],)}[place]
    kwargs = {"input": packed} if place == "keyword" else {}
    name = "input" if kwargs else 0
    with pytest.raises(ValueError, match=rf"argument {name} of the model.*pack_padded_sequence\(x"):
        private(network)(*args, **kwargs)
    x, found = rnn.pad_packed_sequence(packed, batch_first=True)
    assert found.tolist() == lengths
    inputs = {"x": x, "lengths": found}
    assert_exact(Packs().double(), (inputs, torch.randn(3, 2, dtype=torch.float64)))


def test_bags_with_offsets_have_no_rows_of_zeros():
    model = private(nn.EmbeddingBag(9, 2, mode="sum"))
    model.step_state.usage.pad(4, 3)
    with pytest.raises(ValueError, match=r"pad_batches=True adds a row.*leave it out"):
        model(torch.arange(4), torch.tensor([0, 1, 2, 3]))
