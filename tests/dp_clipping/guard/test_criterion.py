"""Criterions whose loss of a sample depends on other samples are refused, and no others are."""

import functools
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dp_clipping.criterion import PrivateCriterion
from dp_clipping.sampling.usage import Ticket
from tests.dp_clipping.conftest import private
from tests.support import zoo
from tests.support.turns import in_turn


def contrast(criterion, outputs, targets):
    return (outputs @ targets.t()).logsumexp(1)


def running_mean(criterion, outputs, targets):
    losses = (outputs - targets).square().sum(1)
    before = 1 if criterion.kept is None else criterion.kept
    criterion.kept = losses.detach().mean()
    return losses / before


def queue(criterion, outputs, targets):
    losses = (outputs - targets).square().sum(1)
    if criterion.queue:
        losses = losses + (outputs @ torch.stack(criterion.queue).t()).logsumexp(1)
    criterion.queue.extend(outputs.detach())
    return losses


def class_weights(criterion, outputs, targets):
    kinds = (targets[:, 0] > 0).long()
    return (outputs - targets).square().sum(1) / torch.bincount(kinds, minlength=2)[kinds]


def plain(criterion, outputs, targets):
    return (outputs - targets).square().sum(1)


def logged(criterion, outputs, targets):
    losses = plain(criterion, outputs, targets)
    criterion.kept = losses.mean().item()
    criterion.queue.append(criterion.kept)
    return losses


def annealed(criterion, outputs, targets):
    criterion.count += 1
    return plain(criterion, outputs, targets) * criterion.count


OF_OTHERS = "loss of a sample depends on "
ACROSS = {
    "similarities": (lambda c, o, t: (o @ o.t()).logsumexp(1), OF_OTHERS),
    "in-batch negatives": (contrast, OF_OTHERS),
    "centred": (lambda c, o, t: (o - o.mean(0)).square().sum(1), OF_OTHERS),
    "differences": (lambda c, o, t: (o - o.roll(1, 0)).square().sum(1), OF_OTHERS),
    "the sample before": (lambda c, o, t: (o.roll(1, 0) - t).square().sum(1), OF_OTHERS),
    "a cumulative sum": (lambda c, o, t: plain(c, o, t).cumsum(0), OF_OTHERS),
    "others' targets": (lambda c, o, t: (o - t.roll(1, 0)).square().sum(1), OF_OTHERS),
    "class weights": (class_weights, OF_OTHERS),
    "a count": (lambda c, o, t: plain(c, o, t) / (1 + (t > 0).sum()), OF_OTHERS),
    "the largest": (lambda c, o, t: plain(c, o, t) / plain(c, o, t).detach().max(), OF_OTHERS),
    "a running mean": (running_mean, "one batch is carried into the next, in kept"),
    "a queue": (queue, "one batch is carried into the next, in queue"),
    "its own": (plain, None),
    "a log": (logged, None),
    "a weight that grows": (annealed, None),
    "their number": (lambda c, o, t: plain(c, o, t) / len(o), OF_OTHERS + "how many"),
    "their places from the end": (
        lambda c, o, t: plain(c, o, t) * torch.arange(len(o), 0, -1),
        OF_OTHERS,
    ),
    "their places": (lambda c, o, t: plain(c, o, t) * torch.arange(1, len(o) + 1), OF_OTHERS),
    "noise": (lambda c, o, t: (o - t + torch.randn_like(o)).square().sum(1), None),
    "others' targets by chance": (
        lambda c, o, t: (o - t[torch.randperm(len(t))]).square().sum(1),
        OF_OTHERS,
    ),
    "noise beside a mean": (
        lambda c, o, t: (o - t + torch.randn_like(o)).square().sum(1) * o.detach().abs().mean(),
        OF_OTHERS,
    ),
    "dropout": (lambda c, o, t: plain(c, nn.functional.dropout(o, 0.02), t), None),
    "noise of Python": (lambda c, o, t: plain(c, o, t) * random.random(), None),
}


class Loss:
    reduction = "mean"

    def __init__(self, function):
        self.function, self.kept, self.queue, self.count = function, None, [], 0

    def __call__(self, outputs, targets):
        return self.function(self, outputs, targets)


@pytest.mark.parametrize(("name", "size"), in_turn(ACROSS, (2, 4, 7)))
def test_a_loss_across_the_batch_is_refused(name, size):
    function, message = ACROSS[name]
    model, criterion = private(nn.Linear(5, 3)), Loss(function)
    loss = PrivateCriterion(model, criterion, "mean")
    torch.manual_seed(size)
    x, y = torch.randn(size, 5), torch.randn(size, 3)
    loss(model(x[:1]), y[:1])
    if message is None:
        loss(model(x), y).backward()
        assert criterion.count in (0, 2)  # what the search has called is not counted
        assert len(criterion.queue) in (0, 2)
        return
    with pytest.raises(ValueError, match=message):
        loss(model(x), y).backward()
    assert all(p.grad is None for p in model.network.parameters())


@pytest.mark.parametrize("mixing", [0.0, 1e-2])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_loss_of_nearly_cancelling_terms_that_are_summed_in_another_order(size, mixing):
    def another_order(criterion, outputs, targets):
        terms = (outputs * targets).unbind(1)
        total = functools.reduce(torch.add, terms if len(outputs) % 2 else terms[::-1])
        return total * (1 + mixing * outputs.detach().abs().mean())

    network = nn.Linear(5, 3)
    x = torch.randn(size, 5)
    y = 1e4 * torch.cross(network(x).detach(), torch.randn(size, 3), dim=1) + torch.randn(size, 3)
    model = private(network)
    loss = PrivateCriterion(model, Loss(another_order), "mean")
    with pytest.raises(ValueError, match=OF_OTHERS) if mixing else nullcontext():
        loss(model(x), y).backward()


def test_a_target_that_is_compared_with_a_constant_has_no_errors():
    """Else a loss would change with the last bit of it, and what others change be no finding."""

    def by_ratings(criterion, outputs, targets):
        losses = (outputs - (targets >= 0.5).to(outputs.dtype)).square().sum(1)
        return losses * outputs.detach().abs().mean()

    model = private(nn.Linear(5, 3))
    loss = PrivateCriterion(model, Loss(by_ratings), "mean")
    with pytest.raises(ValueError, match=OF_OTHERS):
        loss(model(torch.randn(6, 5)), torch.full((6, 3), 0.5)).backward()


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", [name for name in ACROSS if ACROSS[name][1] == OF_OTHERS])
def test_a_loss_across_a_batch_that_is_padded_is_refused(name, size):
    model = private(nn.Linear(5, 3))
    loss = PrivateCriterion(model, Loss(ACROSS[name][0]), "mean")
    rows = [*range(size), *[0] * (8 - size)]  # copies of the first sample follow
    x, y = torch.randn(size, 5), torch.randn(size, 3)
    x[0], y[0] = 3, -3  # of the largest loss
    model.step_state.usage.hand_over(Ticket(size, rows=8))
    with pytest.raises(ValueError, match=OF_OTHERS):
        loss(model(x[rows]), y[rows]).backward()


LATER = [name for name, (_, message) in ACROSS.items() if message and "carried" not in message]


@pytest.mark.parametrize("size", [4, 20])
@pytest.mark.parametrize("name", LATER)
def test_a_loss_that_begins_to_look_across_the_batch_is_refused_at_the_next_check(name, size):
    function, message = ACROSS[name]
    model, criterion = private(nn.Linear(5, 3)), Loss(plain)
    loss = PrivateCriterion(model, criterion, "mean")
    torch.manual_seed(size)
    x, y = torch.randn(size, 5), torch.randn(size, 3)
    for _ in range(3):
        loss(model(x), y).backward()
        model.zero_grad()
    criterion.function = function
    with pytest.raises(ValueError, match=message):
        loss(model(x), y).backward()
    assert all(p.grad is None for p in model.network.parameters())


def several(net, x):
    """Outputs of which a loss may use what it should not."""
    y = net.layer(x)
    return {"logits": y, "balance": y.mean(), "keys": [y * 2]}


@pytest.mark.parametrize("use", ["balance", "keys", "between", "hook", None])
def test_every_tensor_that_a_loss_is_made_of_is_looked_at(use):
    def criterion(logits, targets, balance=0.0, keys=None):
        losses = (logits - targets).square().sum(1) + balance
        return losses if keys is None else losses + (logits @ keys[0].t()).logsumexp(1)

    model = private(zoo.Net(several, layer=nn.Linear(5, 3)))
    outputs = model(torch.randn(4, 5))
    more = {use: outputs[use]} if use in outputs else {}
    logits = outputs["logits"]
    if use == "between":
        logits = logits - logits.mean(0)
    if use == "hook":
        logits.register_hook(lambda gradient: gradient / gradient.norm())
    loss = PrivateCriterion(model, criterion, "mean")
    if use is None:
        loss(logits, torch.zeros(4, 3), **more).backward()
        assert len(model.per_sample_gradient_norms) == 4
        return
    with pytest.raises(ValueError, match=r"depends on the outputs of other|no dimension counts"):
        loss(logits, torch.zeros(4, 3), **more)


@pytest.mark.parametrize("length", [4, 6, 8, 12])
@pytest.mark.parametrize("joined", [False, True])
def test_ctc_is_not(length, joined):
    """[T, B, C], also where T is B or a multiple of it."""
    model = private(
        zoo.Net(lambda net, x: net.layer(x).log_softmax(-1).transpose(0, 1), layer=nn.Linear(5, 7))
    )
    sizes = torch.tensor([1, 2, 1, 1])
    targets = torch.randint(1, 7, (4, 2))
    if joined:
        targets = torch.cat([row[:size] for row, size in zip(targets, sizes, strict=True)])
    loss = PrivateCriterion(model, nn.CTCLoss(), "mean")
    outputs = model(torch.randn(4, length, 5))
    loss(outputs, targets, torch.full((4,), length), sizes).backward()
    assert len(model.per_sample_gradient_norms) == 4


def test_a_criterion_is_not_called_for_an_empty_draw():
    """CTC refuses to be."""
    model = private(nn.Linear(4, 5))
    loss = PrivateCriterion(model, nn.CTCLoss(), "mean")
    lengths = torch.zeros(0, dtype=torch.long)
    outputs = model(torch.randn(0, 6, 4)).log_softmax(-1).transpose(0, 1)
    found = loss(outputs, torch.zeros(0, 2, dtype=torch.long), lengths, lengths)
    found.backward()
    assert found.item() == 0
    assert model.per_sample_gradient_norms.shape == (0,)
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("across", [False, True])
def test_so_is_one_where_the_batch_is_the_second_dimension(across):
    """Tokens [T], before samples [B]; T is a multiple of B."""

    class Last:
        reduction = "mean"

        def __call__(self, outputs, targets):
            last = outputs[-1] - outputs[-1].mean(0) * across
            return (last - targets).square().sum(1)

    model = private(nn.Linear(5, 3), batch_first=False)
    loss = PrivateCriterion(model, Last(), "mean")
    x, y = torch.randn(8, 4, 5), torch.randn(4, 3)
    if not across:
        loss(model(x), y).backward()
        assert len(model.per_sample_gradient_norms) == 4
        return
    with pytest.raises(ValueError, match="loss of a sample depends on the outputs of other"):
        loss(model(x), y)


@pytest.mark.parametrize("returned", [None, 1.0, (torch.ones(4),), {"loss": 1}])
def test_a_criterion_that_returns_no_tensor_is_named(returned):
    loss = PrivateCriterion(private(nn.Linear(5, 3)), lambda o: returned, "mean")
    with pytest.raises(TypeError, match="the criterion returned"):
        loss(loss.model(torch.randn(4, 5)))
    with pytest.raises(TypeError, match="shape is"):
        loss(loss.model(torch.randn(4, 5)), shape=(4,))
