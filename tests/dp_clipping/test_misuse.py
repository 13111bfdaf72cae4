"""Calls that would step around clipping or noise are refused, saying what to do."""

import pytest
import torch

from tests.dp_clipping import test_engine as engine


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
    with pytest.raises(ValueError, match="give one number, or one a sample"):
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


def test_products_of_losses_are_refused(run):
    loss, _ = loss_of(run, engine.data()[:5])
    with pytest.raises(ValueError, match="put products of losses into the criterion"):
        loss * loss
