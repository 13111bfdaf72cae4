"""An engine and its account: the batches and the δ of which it warns."""

import math
import warnings

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager as OpacusBatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import BatchMemoryManager, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order is the")
SAMPLES = 20
OTHER = "did not come from the data_loader that make_private returned"


def made(**options):
    """Returns the engine, the user's own loader, and what make_private returned."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    own = DataLoader(
        TensorDataset(torch.randn(SAMPLES, 3), torch.randint(2, (SAMPLES,))), batch_size=5
    )
    engine = PrivacyEngine(accountant="rdp")
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    return engine, own, engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1), data_loader=own,
        **given,
    )  # fmt: skip


def train(batches, model, optimizer, criterion):
    for x, y in batches:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_batches_of_the_users_own_loader_are_no_poisson_batches():
    """One warning, at the user's line; the statement has no finite ε, and says why."""
    engine, own, (model, optimizer, criterion, _) = made()
    with pytest.warns(UserWarning, match=OTHER) as caught:
        train(own, model, optimizer, criterion)
    (warning,) = caught
    assert warning.filename == __file__
    statement = engine.privacy_statement(delta=1e-3)
    assert statement.epsilon == math.inf
    assert statement.sampler.startswith("not known for 4 batches")
    assert 0 < engine.get_epsilon(delta=1e-3) < math.inf


@pytest.mark.filterwarnings(f"ignore:.*{OTHER}")
def test_a_resumed_run_has_had_other_batches_too(path):
    engine, own, (model, optimizer, criterion, _) = made()
    train(own, model, optimizer, criterion)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, _, (model, optimizer, *_) = made()
    again.load_checkpoint(path=path, module=model, optimizer=optimizer)
    statement = again.privacy_statement(delta=1e-3)
    assert statement.epsilon == math.inf
    assert statement.sampler.startswith("not known for 4 batches")


@pytest.mark.filterwarnings(f"ignore:.*{OTHER}", "ignore:poisson_sampling=False")
@pytest.mark.parametrize("options", [{}, {"poisson_sampling": False}])
def test_a_checkpoint_of_one_run_knows_the_batches_of_all(path, options):
    """Its account has the steps of all."""
    engine, own, (model, optimizer, *_) = made()
    network = nn.Linear(3, 2)
    other, by, criterion, _ = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1), data_loader=own,
        noise_multiplier=1.0, max_grad_norm=1.0, **options,
    )  # fmt: skip
    train(own, other, by, criterion)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, _, (model, optimizer, *_) = made()
    again.load_checkpoint(path=path, module=model, optimizer=optimizer)
    statement = again.privacy_statement(delta=1e-3)
    assert (statement.epsilon, statement.steps) == (math.inf, 4)


@pytest.mark.parametrize("manager", [None, BatchMemoryManager, OpacusBatchMemoryManager])
def test_batches_of_the_returned_loader_are(manager):
    engine, _, (model, optimizer, criterion, loader) = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if manager is None:
            train(loader, model, optimizer, criterion)
        else:
            with manager(
                data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
            ) as pieces:
                train(pieces, model, optimizer, criterion)
    statement = engine.privacy_statement(delta=1e-3)
    assert (statement.sampler, statement.steps) == ("poisson", 4)
    assert statement.epsilon < math.inf


def test_steps_without_a_guarantee_need_no_warning():
    for options in ({"noise_multiplier": 0.0}, {"grad_sample_mode": "no_dp"}):
        _, own, (model, optimizer, criterion, _) = made(**options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(own, model, optimizer, criterion)


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({}, 20),
        ({"examples_per_unit": 5}, 4),
        ({"examples_per_unit": 5, "unit_ids": [*range(20)]}, 20),
    ],
)
def test_a_delta_that_is_too_large(options, units):
    engine, *_ = made(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.get_epsilon(delta=0.9 / units)
    with pytest.warns(UserWarning, match=f"the data have {units} units of privacy") as caught:
        engine.get_epsilon(delta=1 / units)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.get_epsilon(delta=1 / units)  # once


def test_a_target_delta_that_is_too_large():
    network = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    with pytest.warns(UserWarning, match="delta is 0.5, and the data have 64 units") as caught:
        PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=8), target_epsilon=8.0, target_delta=0.5,
            epochs=1, max_grad_norm=1.0,
        )  # fmt: skip
    assert caught[0].filename == __file__


def test_delta_is_missing():
    engine, *_ = made()
    for method in (engine.get_epsilon, engine.privacy_statement):
        with pytest.raises(TypeError, match=r"delta is missing: engine\..*\(delta=1e-5\)"):
            method()
