"""A private loss is used like one number; test_criterion.py has what comes of its backward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_clipping.criterion import PrivateCriterion
from dp_clipping.losses.private_loss import PrivateLoss
from tests.dp_clipping.conftest import private


@pytest.fixture
def loss():
    return PrivateLoss(private(nn.Linear(2, 2)), None, torch.tensor([1.0, 3.0]), "mean")


def test_it_is_one_number(loss):
    assert loss.item() == float(loss) == loss.detach() == 2.0
    assert f"{loss:.1f}" == "2.0"
    assert f"{loss}" == "PrivateLoss(2.0000, mean of 2 samples)"


def test_arithmetic_acts_on_each_sample(loss):
    made = -(2 * loss + 1 - loss) / 4
    assert made.loss_per_sample.tolist() == [-0.5, -1.0]


def test_two_losses_are_not_multiplied(loss):
    with pytest.raises(ValueError, match="multiplied and divided by constants"):
        loss * loss


@pytest.mark.parametrize("name", ["mean", "sum"])
def test_it_is_reduced_already(loss, name):
    with pytest.raises(TypeError, match=r"is the mean of its batch already: call loss\.backward"):
        getattr(loss, name)()


def test_a_loss_of_evaluation_has_no_backward(loss):
    with pytest.raises(RuntimeError, match="call the model in training mode"):
        loss.backward()


@pytest.mark.parametrize(
    "options", [{"retain_graph": True}, {"create_graph": True}, {"gradient": torch.ones(())}]
)
def test_arguments_of_a_tensors_backward_show_what_works(loss, options):
    with pytest.raises(ValueError, match=r"each forward has one backward, .*\.backward\(\)"):
        loss.backward(**options)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def test_reentrant_checkpointing_is_refused():
    model = private(nn.Sequential(nn.Linear(2, 2), Checkpointed(nn.Linear(2, 2))), "bookkeeping")
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")
    with pytest.raises(RuntimeError, match=r"checkpoint\(\.\., use_reentrant=False\)"):
        criterion(model(torch.randn(3, 2)), torch.tensor([0, 1, 0])).backward()
