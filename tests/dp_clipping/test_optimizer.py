"""`PrivateOptimizer.pre_step`: noise is added once, and never left out, whoever asks for it."""

import pytest
import torch
from torch import nn

from tests.support.engine import fixed, on_any_batches


@pytest.fixture
def private():
    """Model, optimizer and criterion, and the engine that counts."""
    torch.manual_seed(0)
    run = on_any_batches(
        module=nn.Linear(3, 2), lr=1.0, dataset=range(4), batch_size=2, max_grad_norm=1.0,
        grad_sample_mode="bookkeeping", noise_generator=fixed(1), accountant="pld",
    )  # fmt: skip
    return run.model, run.optimizer, run.criterion, run.engine


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


def backward_of(model, criterion, *samples: float):
    x = torch.tensor(samples).view(-1, 1).expand(-1, 3)
    criterion(model(x), torch.arange(len(samples)) % 2).backward()


NAN, INF = float("nan"), float("inf")


def test_a_first_step_of_noise_alone_is_refused_before_it_is_counted(private):
    """Later steps without a finite sample do not tell: they apply noise."""
    model, optimizer, criterion, engine = private
    before = model.network.weight.detach().clone()
    for _ in range(2):
        backward_of(model, criterion, NAN, NAN)
        with pytest.raises(RuntimeError, match="no sample of the first step has a finite gradient"):
            optimizer.step()
        assert model.network.weight.grad is None
        assert torch.equal(model.network.weight, before)
        assert (steps(engine), optimizer.steps) == (0, 0)
    backward_of(model, criterion, NAN, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    backward_of(model, criterion, NAN, NAN)
    assert not gradient(model).any()
    optimizer.step()
    assert gradient(model).isfinite().all()
    assert gradient(model).all()
    assert (steps(engine), optimizer.steps) == (2, 2)


def test_a_first_step_is_that_with_the_first_samples(private):
    """An empty draw shows nothing; each part of a batch counts."""
    model, optimizer, criterion, engine = private
    backward_of(model, criterion)
    optimizer.step()
    optimizer.zero_grad()
    backward_of(model, criterion, INF)
    with pytest.raises(RuntimeError, match="no sample of the first step"):
        optimizer.pre_step()
    assert steps(engine) == 1
    for sample in (1.0, NAN):
        optimizer.signal_skip_step(do_skip=sample == 1.0)
        backward_of(model, criterion, sample)
        optimizer.step()
        optimizer.zero_grad()
    assert steps(engine) == 2


def test_a_run_that_goes_on_has_had_finite_samples(private):
    model, optimizer, criterion, _ = private
    optimizer.resume(3, b"x" * 32)
    backward_of(model, criterion, NAN)
    optimizer.step()
    assert optimizer.steps == 4
