"""Calls that would step around clipping or noise are refused, saying what to do."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import Unseen, assert_close, private, private_loss
from tests.support import engine, zoo


@pytest.fixture
def run():
    return engine.build()


UNCLIPPED = r"ordinary backward.*added to the gradient of 0\.bias, 0\.weight, 2\.bias"


def plain_backward(run):
    run.model.eval()
    F.cross_entropy(run.model(engine.data()[5:6][0]), torch.tensor([1])).backward()
    run.model.train()


def test_an_ordinary_backward_before_the_step_is_refused(run):
    engine.backward(run, engine.data()[:5])
    plain_backward(run)
    before = engine.parameters(run)
    for apply in (run.optimizer.step, run.optimizer.pre_step):
        with pytest.raises(RuntimeError, match=UNCLIPPED):
            apply()
    with pytest.raises(RuntimeError, match=UNCLIPPED):
        engine.backward(run, engine.data()[:5])
    assert all(map(torch.equal, before, engine.parameters(run)))
    assert run.engine.accountant.history == []
    run.optimizer.zero_grad()
    engine.step(run)


def test_an_ordinary_backward_after_the_noise_is_refused(run):
    engine.backward(run, engine.data()[:5])
    run.optimizer.pre_step()
    plain_backward(run)
    with pytest.raises(RuntimeError, match=UNCLIPPED):
        run.optimizer.step()


def test_a_step_whose_noise_failed_is_no_step(run, monkeypatch):
    """Some gradients may have theirs: another attempt would add to it."""
    engine.backward(run, engine.data()[:5])
    before = engine.parameters(run)
    with monkeypatch.context() as patch:
        patch.setattr(run.model.gradient_buffer, "apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.optimizer.step()
    assert all(p.grad is None for p in run.model.parameters())
    with pytest.raises(RuntimeError, match="without a backward since the last one"):
        run.optimizer.step()
    assert all(map(torch.equal, before, engine.parameters(run)))
    engine.step(run)
    assert run.optimizer.steps == 2


def test_ordinary_training_goes_on_afterwards():
    run = engine.build()
    engine.step(run)
    net = run.model.to_standard_module()
    F.cross_entropy(net(engine.data()[:5][0]), engine.data()[:5][1]).backward()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    run.optimizer.original_optimizer.step()


def test_a_stale_gradient_of_a_frozen_parameter_is_not_applied():
    net = engine.network()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    net[0].weight.requires_grad_(False)
    run = engine.build(module=net)
    before = net[0].weight.clone()
    engine.step(run)
    assert torch.equal(net[0].weight, before)


def test_a_scheduler_cannot_set_what_make_private_refuses(run):
    with pytest.raises(ValueError, match="max_grad_norm is"):
        run.optimizer.max_grad_norm = 0.0
    assert run.optimizer.max_grad_norm == 0.5
    engine.step(run)


def test_a_noise_multiplier_is_checked_before_it_is_counted(run):
    engine.backward(run, engine.data()[:5])
    run.optimizer.noise_multiplier = math.nan
    for apply in (run.optimizer.step, run.optimizer.pre_step):
        with pytest.raises(ValueError, match="noise_multiplier is"):
            apply()
    assert (run.optimizer.steps, run.engine.accountant.history) == (0, [])
    run.optimizer.noise_multiplier = 1.0
    run.optimizer.step()


def test_freezing_what_something_else_stands_for_is_refused():
    """As FSDP has other objects in the place of the parameters between forward and backward."""
    run = engine.build()
    engine.step(run)
    layer = run.model.network[2]
    own = layer.bias
    layer._parameters["bias"] = nn.Parameter(own.detach().clone())
    own.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"2\.bias \(frozen now\): freeze and unfreeze before"):
        engine.step(run)


class WithPositions(nn.Module):
    """Position ids [1, T], to be broadcast, beside ids [B, T]."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, ids, positions):
        return self.last(self.words(ids) + self.places(positions)).mean(1)


IDS, POSITIONS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 1, 1]]), torch.arange(3)[None]


def positioned(ids, first=None, again=False):
    model = private(zoo.seeded(WithPositions), max_grad_norm=1e6)
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(reduction="sum"), "sum")
    if first is not None:
        if again:
            model(IDS, POSITIONS)
            model.reset_batch_layouts()
        model(first, POSITIONS)
    criterion(model(ids, POSITIONS), torch.zeros(len(ids)).long()).backward()
    return {n: p.grad.clone() for n, p in model.network.named_parameters()}, model


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("rows", [0, 1])
def test_what_one_sample_tells_of_the_layout_is_provisional(rows, again):
    expected, _ = positioned(IDS)
    gradients, model = positioned(IDS, first=IDS[:rows], again=again)
    assert_close(gradients, expected, 1e-6)
    assert len(model.per_sample_gradient_norms) == 3
    positioned(IDS[:1], first=IDS)


def test_an_empty_batch_is_seen_beside_inputs_to_broadcast():
    gradients, model = positioned(IDS[:0])
    assert len(model.per_sample_gradient_norms) == 0
    assert not any(g.any() for g in gradients.values())


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_an_empty_batch_with_the_batch_in_dimension_1(tokens):
    model = private(nn.Sequential(nn.Linear(4, 3)), batch_first=False)
    assert model(torch.randn(tokens, 4, 4)).shape == (tokens, 4, 3)
    assert model(torch.randn(tokens, 0, 4)).shape == (tokens, 0, 3)


HELD = Unseen()


class Held(torch.autograd.Function):
    """The identity, with something large for its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.large = torch.zeros(1000)
        HELD.values.append(weakref.ref(ctx.large))
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        return gy


class Fails(torch.autograd.Function):
    """Its first backwards do not: they are of the search for samples that see each other."""

    is_on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        if Fails.is_on:
            raise torch.OutOfMemoryError("as if")
        return gy


class Branches(nn.Module):
    """When one branch fails in backward, the other one is ready."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = Held.apply(self.first(x))
        return self.one(x) * Fails.apply(self.other(x))


@pytest.mark.parametrize("batches", [0, 2], ids=["in_a_check", "in_a_step"])
def test_a_backward_that_failed_keeps_no_activations(batches, monkeypatch):
    """A smaller batch after running out of memory must find it free."""
    network = Branches()
    model = private(network, "bookkeeping")
    batch = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(batches):
        private_loss(model, batch, zoo.product)
    monkeypatch.setattr(Fails, "is_on", True)
    HELD.values.clear()
    with pytest.raises(torch.OutOfMemoryError):
        private_loss(model, batch, zoo.product).backward()
    model.step_state.pending = None  # as the next forward does
    gc.collect()
    assert HELD.values
    assert not any(held() is not None for held in HELD.values)
