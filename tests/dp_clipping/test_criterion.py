"""Losses of a batch, one per sample: arithmetic, reductions, and what is refused."""

import pickle
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import private
from tests.support import engine, zoo


@pytest.fixture
def run():
    return engine.build()


def loss_of(run, batch):
    outputs = run.model(batch[0])
    return run.criterion(outputs, batch[1]), outputs


COMBINED = {
    "plus": lambda loss, other: loss + other,
    "plus it": lambda loss, other: other + loss,
    "minus": lambda loss, other: loss - other,
    "minus it": lambda loss, other: other - loss,
    "times": lambda loss, other: loss * other,
    "times it": lambda loss, other: other * loss,
    "divided": lambda loss, other: loss / other,
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_loss_takes_up_constants_only(run, name):
    loss, outputs = loss_of(run, engine.data()[:5])
    combine = COMBINED[name]
    with pytest.raises(ValueError, match="put the term into the criterion"):
        combine(loss, outputs.mean(0).square().sum())
    with pytest.raises(ValueError, match="give one number, or one per sample"):
        combine(loss, torch.ones(5, 1))
    weights = torch.arange(1.0, 6.0)
    own = loss.loss_per_sample
    for constant in (2.0, torch.tensor(2.0), torch.tensor([[2.0]]), weights):
        expected = combine(
            own,
            constant.reshape(())
            if constant is not weights and isinstance(constant, torch.Tensor)
            else constant,
        )
        assert torch.equal(combine(loss, constant).loss_per_sample, expected)


def test_a_function_without_a_reduction_is_called_as_it_is():
    """Nothing is written on torch's own functions."""
    model = private(nn.Linear(5, 3))
    x, y = torch.randn(4, 5), torch.zeros(4).long()
    single = partial(nn.functional.cross_entropy, reduction="none")
    loss = PrivateCriterion(model, single, "mean")(model(x), y)
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    with pytest.raises(ValueError, match=r"partial\(F.cross_entropy, reduction='none'\)"):
        PrivateCriterion(model, nn.functional.cross_entropy, "mean")(model(x), y)
    assert not hasattr(nn.functional.cross_entropy, "reduction")


@pytest.fixture
def model():
    return private(zoo.linear(3, 2))


def test_losses_of_tokens_are_reduced_over_those_that_count(model):
    x, targets = torch.randn(2, 4, 3), torch.tensor([[0, 1, -100, -100], [1, 1, 0, 0]])
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")
    outputs = model(x)
    loss = criterion(outputs.flatten(0, 1), targets.flatten(), shape=outputs.shape)
    apart = [nn.functional.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]
    torch.testing.assert_close(loss.loss_per_sample, torch.stack(apart))
    assert loss.item() == pytest.approx(torch.stack(apart).mean().item())
    total = PrivateCriterion(model, nn.CrossEntropyLoss(reduction="sum"), "sum")
    outputs = model(x)
    loss = total(outputs.flatten(0, 1), targets.flatten(), shape=outputs.shape)
    apart = [
        nn.functional.cross_entropy(o, t, reduction="sum")
        for o, t in zip(outputs, targets, strict=True)
    ]
    torch.testing.assert_close(loss.loss_per_sample, torch.stack(apart))
    assert loss.item() == pytest.approx(sum(apart).item())


@pytest.mark.parametrize("mode", ["no_dp", "bookkeeping"])
def test_one_sample_may_be_squeezed(mode):
    """`squeeze()` takes a dimension of one sample too, and its loss is a number."""
    model = private(zoo.linear(3, 1), mode)
    criterion, x, y = (
        PrivateCriterion(model, nn.MSELoss(), "mean"),
        torch.randn(4, 3),
        torch.ones(4),
    )
    for size in (4, 1):
        outputs = model(x[:size])
        loss = criterion(outputs.squeeze(), y[:size].squeeze())
        assert loss.item() == pytest.approx(nn.MSELoss()(outputs[:, 0], y[:size]).item())
        loss.backward()
        model.zero_grad()


def test_a_mean_over_the_batch_adds_up_entries(model):
    """Adds up a sample's entries, as PyTorch recommends for KLDivLoss."""
    x, targets = torch.randn(2, 3), torch.randn(2, 2).softmax(1)
    kl = nn.KLDivLoss(reduction="batchmean")
    outputs = model(x).log_softmax(1)
    loss = PrivateCriterion(model, kl, "mean")(outputs, targets)
    assert loss.item() == pytest.approx(kl(outputs, targets).item())
    assert kl.reduction == "batchmean"
    with pytest.raises(ValueError, match="both must be"):
        PrivateCriterion(model, kl, "sum")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_is_reduced_as_pytorch_does(reduction):
    """Its mean divides the loss of each sample by the number of its targets."""
    model = private(
        zoo.Net(lambda net, x: net.layer(x).log_softmax(-1).transpose(0, 1), layer=nn.Linear(5, 7))
    )
    ctc = nn.CTCLoss(reduction=reduction)
    outputs, targets = model(torch.randn(3, 6, 5)), torch.randint(1, 7, (3, 4))
    lengths = torch.tensor([6, 5, 6]), torch.tensor([1, 4, 2])
    loss = PrivateCriterion(model, ctc, reduction)(outputs, targets, *lengths)
    assert loss.item() == pytest.approx(ctc(outputs, targets, *lengths).item())


def test_a_loss_of_several_forwards_is_refused_with_what_works(run):
    """Refuses what a triplet, or two branches of a Siamese network, would need."""
    run.criterion.criterion = nn.MSELoss()
    x = engine.data()[:5][0]
    one, other = run.model(x), run.model(x)
    with pytest.raises(RuntimeError, match=r"of several forwards .*as return net\(a\), net\(b\)"):
        run.criterion(one, other).backward()


def test_a_parameter_that_the_network_returns_has_a_row_for_each_sample():
    network = zoo.Net(
        lambda net, x: (net.layer(x), net.factors),
        layer=nn.Linear(4, 3), factors=nn.Parameter(torch.ones(2)),
    )  # fmt: skip
    model, x, y = private(network), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])

    def weighted(place, outputs, targets):
        logits, factors = outputs
        return F.cross_entropy(logits, targets, reduction="none") * factors[place]

    PrivateCriterion(model, partial(weighted, (..., 0)), "mean")(model(x), y).backward()
    with pytest.raises(ValueError, match=r"returns a tensor without samples.*factors\[\.\.\., 0\]"):
        PrivateCriterion(model, partial(weighted, 0), "mean")(model(x), y)


def test_outputs_of_the_plain_network_are_refused_with_what_works(run):
    x, y = engine.data()[:5]
    with pytest.raises(RuntimeError, match=r"call the model that make_private .* its methods"):
        run.criterion(run.model.network(x), y)


def weighted(outputs, targets, weight):
    return nn.functional.cross_entropy(outputs, targets, weight, reduction="none")


def labelled(size, classes=2):
    return torch.randn(size, 3), torch.arange(1, size + 1) % classes


HEAD = nn.Linear(engine.CLASSES, engine.CLASSES)


class Behind(nn.Module):
    """A criterion with parameters."""

    def __init__(self, trains):
        super().__init__()
        self.head = deepcopy(HEAD).requires_grad_(trains)

    def forward(self, outputs, labels):
        return F.cross_entropy(self.head(outputs), labels, reduction="none")


WITH_PARAMETERS = {
    "criterion": (lambda: Behind(True), lambda model, x: model(x)),
    "function": (lambda: Behind(True).forward, lambda model, x: model(x)),
    "behind": (nn.CrossEntropyLoss, lambda model, x: HEAD(model(x))),
}


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_parameters_that_get_no_gradient_are_told(name):
    criterion, outputs = WITH_PARAMETERS[name]
    run = engine.build(criterion=criterion())
    x, y = next(iter(run.loader))
    with pytest.warns(UserWarning, match=r"\(3, 3\), \(3,\).*no gradient: let the module"):
        run.criterion(outputs(run.model, x), y).backward()


def test_frozen_ones_are_not(recwarn):
    run = engine.build(criterion=Behind(False))
    loss_of(run, next(iter(run.loader)))[0].backward()
    assert not [w for w in recwarn if "no gradient" in str(w.message)]


def test_class_weights_of_as_many_classes_as_samples_may_be_given_if_shapes_have_told(model):
    criterion, weight = PrivateCriterion(model, weighted, "mean"), torch.tensor([0.5, 2.0])
    for size in (3, 2, 4, 2):
        x, targets = labelled(size)
        criterion(model(x), targets, weight).backward()
        model.zero_grad()


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (1, 2)])
def test_without_that_a_refusal_shows_the_call_that_works(model, sizes):
    criterion, weight = PrivateCriterion(model, weighted, "mean"), torch.tensor([0.5, 2.0])

    def steps(criterion, **given):
        for size in sizes:
            x, targets = labelled(size)
            criterion(model(x), targets, **given).backward()
            model.zero_grad()

    with pytest.raises(ValueError, match=r"functools\.partial\(loss_function, weight=weight\)"):
        steps(criterion, weight=weight)
    model.zero_grad()
    steps(PrivateCriterion(model, partial(weighted, weight=weight), "mean"))
    steps(PrivateCriterion(model, nn.CrossEntropyLoss(weight), "mean"))


def across(outputs, others):
    return (outputs @ others.T).logsumexp(1)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 3)])
def test_other_samples_are_no_constant(model, sizes):
    """In-batch negatives, whose shape follows the batch's."""
    criterion = PrivateCriterion(model, across, "mean")
    for size in sizes:
        with pytest.raises(ValueError, match="depends on "):
            criterion(model(torch.randn(size, 3)), torch.randn(size, 2)).backward()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_captured_loss_is_of_the_samples_that_its_mask_leaves(reduction):
    model = private(zoo.linear(3, 2), "bookkeeping")
    criterion = PrivateCriterion(model, zoo.Criterion(zoo.product, reduction), reduction)
    batch = torch.ones(4, 3), torch.tensor([1.0, 2.0, 3.0, torch.nan])[:, None].expand(4, 2)
    expected = criterion(model(batch[0]), batch[1]).loss_per_sample[:3]
    model.passes.padding = torch.tensor([False, False, False, True])
    loss = criterion(model(batch[0]), batch[1])
    torch.testing.assert_close(loss.detach(), getattr(expected.detach(), reduction)())
    with pytest.raises(RuntimeError, match=r"use detach\(\)"):
        loss.loss_per_sample  # noqa: B018


def test_it_takes_the_place_of_a_module():
    """A LightningModule may hold it: it is no second way to the network's parameters, and moves."""
    weighted = nn.CrossEntropyLoss(weight=torch.ones(2))
    model = private(nn.Linear(2, 2))
    holder = nn.Module()
    holder.criterion = weighted
    holder.criterion = PrivateCriterion(model, weighted, "mean")
    assert holder.criterion.model is model
    assert not list(holder.parameters())
    assert list(holder.state_dict()) == ["criterion.criterion.weight"]
    holder.double()
    assert weighted.weight.dtype == torch.float64
    for copied in (deepcopy(holder).criterion, pickle.loads(pickle.dumps(holder.criterion))):
        assert type(copied) is nn.CrossEntropyLoss, "as a model's copy is its network"
        assert copied is not weighted
    holder.criterion = PrivateCriterion(model, F.cross_entropy, "mean")
    outputs, targets = torch.randn(3, 2), torch.tensor([0, 1, 1])
    for copied in (deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        loss = copied.eval().criterion(outputs, targets)
        assert loss == F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("across", [False, True])
def test_it_is_run_again_under_the_autocast_of_its_call(model, across):
    """The backward, after which it is, is outside."""
    matrix = torch.ones(2, 2)

    def loss(outputs, targets):
        return (outputs @ matrix - targets - across * targets.mean(0)).square().sum(1)

    criterion = PrivateCriterion(model, loss, "mean")
    with torch.autocast("cpu", torch.bfloat16):
        found = criterion(model(torch.randn(4, 3)), torch.randn(4, 2))
    with pytest.raises(ValueError, match="argument 2") if across else nullcontext():
        found.backward()
