"""`PrivateOptimizer.pre_step`: noise is added once, and never left out, whoever asks for it."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dp_clipping import PrivacyEngine


@pytest.fixture
def private():
    """Model, optimizer and criterion, and the engine that counts."""
    torch.manual_seed(0)
    engine, network = PrivacyEngine(), nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = engine.make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(range(4), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode="bookkeeping",
            noise_generator=torch.Generator().manual_seed(1),
        )
    return *made[:3], engine


def backward(model, criterion):
    criterion(model(torch.ones(2, 3)), torch.tensor([0, 1])).backward()


def gradient(model):
    return model.network.weight.grad.clone()


def steps(engine):
    return sum(count for _, _, count in engine.accountant.history)


def test_step_applies_what_pre_step_left(private):
    model, optimizer, criterion, engine = private
    backward(model, criterion)
    clipped = gradient(model)
    assert optimizer.pre_step()
    noisy, before = gradient(model), model.network.weight.detach().clone()
    assert not torch.allclose(noisy, clipped / 2)
    assert optimizer.pre_step()  # a second call adds nothing
    optimizer.step()
    torch.testing.assert_close(before - model.network.weight, noisy)
    assert (steps(engine), optimizer.steps) == (1, 1)


def test_a_backward_after_pre_step_gets_noise_of_its_own(private):
    model, optimizer, criterion, engine = private
    backward(model, criterion)
    optimizer.pre_step()
    for parameter in model.parameters():
        parameter.grad = None  # by hand: nobody tells the optimizer
    backward(model, criterion)
    clipped = gradient(model)
    optimizer.step()
    assert not torch.allclose(gradient(model), clipped / 2)
    assert (steps(engine), optimizer.steps) == (2, 2)


def test_a_skipped_step_is_not_prepared(private):
    model, optimizer, criterion, engine = private
    backward(model, criterion)
    optimizer.signal_skip_step()
    clipped = gradient(model)
    assert not optimizer.pre_step()
    optimizer.step()
    assert torch.equal(gradient(model), clipped)
    assert steps(engine) == 0


def test_without_a_backward_there_is_nothing_to_prepare(private):
    model, optimizer, criterion, _ = private
    with pytest.raises(RuntimeError, match="without a backward"):
        optimizer.pre_step()
    backward(model, criterion)
    optimizer.pre_step()
    optimizer.step()
    with pytest.raises(RuntimeError, match="without a backward"):
        optimizer.step()


def test_a_run_that_goes_on_without_its_account_is_refused(private):
    """From the optimizer's own state, which plain loops save, and which counts the steps."""
    model, optimizer, criterion, engine = private
    backward(model, criterion)
    optimizer.step()
    state = optimizer.state_dict()
    assert state["private_steps"] == 1
    optimizer.load_state_dict(state)  # of this very run
    optimizer.zero_grad()
    backward(model, criterion)
    optimizer.step()
    optimizer.load_state_dict(state | {"private_steps": 5})
    optimizer.zero_grad()
    backward(model, criterion)
    with pytest.raises(RuntimeError, match=r"5 private steps.*counted 2.*engine\.load_checkpoint"):
        optimizer.step()
    assert steps(engine) == 2
    optimizer.resume(5, b"0" * 32)  # as `load_checkpoint` does
    optimizer.zero_grad()
    backward(model, criterion)
    optimizer.step()
    assert steps(engine) == 3
