"""Networks and losses in which samples see each other are refused, and no others are."""

import pytest
import torch
from torch import nn

from dp_clipping.criterion import PrivateCriterion
from dp_clipping.validation import check_module
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
    "before a norm": (lambda net, x: net.second(net.norm(x - x.mean(0))), "norm"),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_network_that_mixes_samples_is_refused(name):
    function, layer = MIXING[name]
    model = private(zoo.seeded(lambda: Function(function)))
    torch.manual_seed(0)
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


def test_mixing_in_training_only_is_refused():
    def function(net, x):
        return net.second(net.first(x - x.mean(0) if net.training else x))

    model = private(zoo.seeded(lambda: Function(function)))
    with pytest.raises(ValueError, match="what first sees of a sample depends on the other"):
        model(torch.randn(4, 5))
    assert model.network.training


@pytest.mark.parametrize("p", [0.02, 0.5])
def test_functional_dropout_before_many_layers_is_no_mixing(p):
    def function(net, x):
        x = nn.functional.dropout(net.first(x), p, net.training)
        return net.second(nn.functional.dropout(net.norm(x), p, net.training))

    for seed in range(10):
        torch.manual_seed(seed)
        assert private(Function(function))(torch.randn(4, 5)).shape == (4, 3)


def frozen_norm():
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).requires_grad_(False), nn.Linear(5, 3))


def test_a_frozen_batch_norm_is_refused_once_train_reaches_it():
    net = frozen_norm()
    net[1].eval()
    model, x = private(net), torch.randn(4, 5)
    assert model(x).shape == (4, 3)
    model.train()
    before = net[1].running_mean.clone()
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\).*1\.eval\(\) after each model.train"):
        model(x)
    torch.testing.assert_close(net[1].running_mean, before)
    net[1].eval()
    assert model(x).shape == (4, 3)


def test_a_frozen_batch_norm_without_statistics_is_refused():
    norm = nn.BatchNorm1d(5, track_running_stats=False).requires_grad_(False).eval()
    with pytest.raises(ValueError, match=r"use nn\.GroupNorm"):
        check_module(nn.Sequential(nn.Linear(5, 5), norm))


class Remembering(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.layer, self.in_place = nn.Linear(5, 3), in_place
        self.register_buffer("fixed", torch.tensor([torch.nan, 1.0]))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        if self.training and self.in_place:
            self.seen += x.detach().sum(0)
        elif self.training:
            self.seen = self.seen + x.detach().sum(0)
        return self.layer(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_a_forward_changes_is_refused_by_name(in_place):
    net = Remembering(in_place)
    with pytest.raises(ValueError, match="a forward in training changes seen:"):
        private(net)(torch.ones(4, 5))
    assert not net.seen.any()


def test_a_module_without_a_batching_rule_is_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory, self.head = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.memory(x)[0])

    with pytest.raises(ValueError, match=r"memory \(GRU\) cannot be run under torch.vmap"):
        private(Recurrent())(torch.randn(4, 3, 5))
