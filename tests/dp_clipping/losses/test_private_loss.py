"""A private loss is used like one number; test_criterion.py has what comes of its backward."""

import pytest
import torch
from torch import nn

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
