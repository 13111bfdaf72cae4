"""Networks and losses in which samples see each other are refused, and no others are."""

import pytest
import torch
from torch import nn

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping import zoo
from tests.dp_clipping.conftest import private


class Function(nn.Module):
    """`function(net, x)` with two linear layers and a norm."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second, self.norm = nn.Linear(5, 5), nn.Linear(5, 3), nn.LayerNorm(5)

    def forward(self, x):
        return self.function(self, x)


MIXING = {
    "centred inputs": (lambda net, x: net.second(net.first(x - x.mean(0))), "first"),
    "a softmax over the batch": (lambda net, x: net.second(net.first(x).softmax(0)), "second"),
    "the batch's largest": (lambda net, x: net.second(net.first(x) / x.amax()), "second"),
    "the last line": (lambda net, x: net.second(net.first(x)).cumsum(0).flip(0), "end of"),
    "partly hidden by a norm": (lambda net, x: net.second(net.norm(x - x.mean(0))), "second"),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_network_that_mixes_samples_is_refused(name):
    function, layer = MIXING[name]
    model = private(zoo.seeded(lambda: Function(function)))
    pattern = rf"what .*{layer}.* sees of a sample depends on the other samples"
    with pytest.raises(ValueError, match=pattern):
        model(torch.randn(4, 5) * torch.tensor([[1.0], [1.0], [9.0], [1.0]]))


def test_it_is_found_when_a_second_sample_comes():
    """One sample alone has no company to change."""
    model = private(zoo.seeded(lambda: Function(MIXING["centred inputs"][0])))
    model(torch.randn(1, 5))
    with pytest.raises(ValueError, match="depends on the other samples"):
        model(torch.randn(3, 5))


def test_dropout_and_a_bad_sample_are_no_mixing():
    net = Function(
        lambda net, x: net.second(nn.functional.dropout(net.first(x), 0.5, net.training))
    )
    x = torch.randn(4, 5)
    x[1] = torch.nan
    model = private(zoo.seeded(lambda: net))
    assert model(x).shape == (4, 3)
    assert model.network.training
    assert all(module.training for module in net.modules())


class Contrast:
    reduction = "mean"

    def __call__(self, outputs, targets):
        return (outputs @ outputs.T).logsumexp(1)


class Normalised:
    reduction = "mean"

    def __call__(self, outputs, targets):
        return (outputs - outputs.mean(0)).square().sum(1)


@pytest.mark.parametrize("criterion", [Contrast(), Normalised()])
def test_a_loss_across_the_batch_is_refused(criterion):
    model = private(nn.Linear(5, 3))
    loss = PrivateCriterion(model, criterion, "mean")
    x = torch.randn(4, 5)
    loss(model(x[:1]), x[:1])
    with pytest.raises(ValueError, match="loss of a sample depends on the outputs of other"):
        loss(model(x), x)


def test_flattened_losses_of_single_samples_are_not():
    model = private(nn.Linear(5, 3))
    loss = PrivateCriterion(model, nn.CrossEntropyLoss(ignore_index=0), "mean")
    outputs, targets = model(torch.randn(4, 6, 5)), torch.randint(3, (4, 6))
    loss(outputs.flatten(0, 1), targets.flatten(), shape=outputs.shape).backward()
    assert len(model.per_sample_gradient_norms) == 4


def test_a_gradient_scaler_is_refused():
    model = private(nn.Linear(5, 3))
    x = torch.randn(4, 5)
    loss = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")(model(x), torch.zeros(4).long())
    with pytest.raises(TypeError, match="use bfloat16"):
        torch.amp.GradScaler("cpu").scale(loss)
