"""An engine and its account: the batches and the δ of which it warns."""

import math
import re
import warnings
from itertools import chain, islice

import pytest
import torch
from opacus.accountants import GaussianAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import BatchMemoryManager, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order is the")
SAMPLES = 20
OTHER = "did not come from the data_loader that make_private returned"


def parts(**options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 3), torch.randint(2, (SAMPLES,)))
    return nn.Linear(3, 2), DataLoader(data, batch_size=5, **options)


def made(accountant="rdp", **options):
    """Returns the engine, the user's own loader, and what make_private returned."""
    network, own = parts()
    engine = PrivacyEngine(accountant=accountant)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    return engine, own, engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1), data_loader=own,
        **given,
    )  # fmt: skip


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_module_of_this_engine_is_saved_and_loaded(wrap_model, path):
    engine, _, (model, optimizer, _, loader) = made(wrap_model=wrap_model)
    given = {"path": path, "module": model, "optimizer": optimizer, "data_loader": loader}
    engine.save_checkpoint(**given)
    for p in model.parameters():
        p.detach().add_(1.0)
    before = [p.clone() for p in model.parameters()]
    engine.load_checkpoint(**given)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_what_another_engine_has_returned_is_not(path):
    engine, _, (model, *_) = made()
    _, _, (other, other_optimizer, _, other_loader) = made()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        for given, message in (
            ({"module": other}, "module is not one that this engine's make_private"),
            ({"optimizer": other_optimizer}, "optimizer is not the one that make_private returned"),
            ({"data_loader": other_loader}, "data_loader is not the one"),
        ):
            with pytest.raises(ValueError, match=message):
                call(**{"path": path, "module": model} | given)


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


@pytest.mark.parametrize("manager", [None, BatchMemoryManager])
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
    with pytest.warns(UserWarning, match="delta is 0.5, and the data have 20 units") as caught:
        with_target("rdp", target_epsilon=8.0, target_delta=0.5)
    assert caught[0].filename == __file__


def test_delta_is_missing():
    engine, *_ = made()
    for method in (engine.get_epsilon, engine.privacy_statement):
        with pytest.raises(TypeError, match=r"missing .*'delta': engine\..*\(delta=1e-5\)"):
            method()


def with_target(accountant="pld", loader_options=None, **options):
    """Returns the engine and what make_private_with_epsilon returned, for one epoch of 4 steps."""
    network, loader = parts(**(loader_options or {}))
    engine = PrivacyEngine(accountant=accountant)
    return engine, engine.make_private_with_epsilon(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1), data_loader=loader,
        **{"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1, **options}, max_grad_norm=1.0,
    )  # fmt: skip


def test_the_default_accountant_is_pld():
    engine, (model, optimizer, criterion, loader) = with_target()
    assert engine.accountant.mechanism() == "pld"
    train(loader, model, optimizer, criterion)
    assert 2.98 < engine.get_epsilon(delta=1e-3) <= 3
    statement = engine.privacy_statement(delta=1e-3)
    assert statement.accountant == "pld"
    assert statement.epsilon == engine.get_epsilon(delta=1e-3)


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
def test_an_approximation_is_said_to_be_one():
    engine, *_ = made("gdp")
    engine.accountant.history = [(1.0, 0.25, 4)]
    with pytest.warns(UserWarning, match="gdp states an approximation that may be below"):
        engine.get_epsilon(delta=1e-3)
    with pytest.warns(UserWarning, match="may be below the true epsilon"):
        statement = engine.privacy_statement(delta=1e-3)
    assert "gdp, which states an approximation that may be below the true epsilon" in str(statement)
    assert "approximation" in statement.as_dict()["accountant"]


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental", "ignore:accountant gdp")
@pytest.mark.parametrize("sigma", [0.05, 0.3, 50.0])
def test_gdp_says_where_it_finds_no_epsilon(sigma):
    engine, *_ = made("gdp")
    engine.accountant.history = [(sigma, 0.01 if sigma > 1 else 0.25, 1)]
    with pytest.raises(ValueError, match=r"gdp finds no ε between .* build PrivacyEngine\(\)"):
        engine.get_epsilon(delta=1e-3)


@pytest.mark.filterwarnings("ignore:delta is")
@pytest.mark.parametrize("delta", [1e-300, 0.999999])
def test_prv_says_where_it_finds_no_epsilon(delta):
    engine, *_ = made("prv")
    engine.accountant.history = [(1.0, 0.125, 8)]
    with pytest.raises(ValueError, match=r"prv finds no ε at delta=.* build PrivacyEngine\(\)"):
        engine.get_epsilon(delta=delta)
    engine, *_ = made("pld")
    engine.accountant.history = [(1.0, 0.125, 8)]
    assert engine.get_epsilon(delta=delta) < 100


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
def test_an_approximation_is_refused_where_a_guarantee_is_asked_for():
    with pytest.raises(ValueError, match=r'PrivacyEngine\(accountant="pld"\)'):
        with_target("gdp")
    with pytest.raises(ValueError, match=r"gdp states an approximation.*secure_mode=True"):
        PrivacyEngine(accountant="gdp", secure_mode=True)
    engine = PrivacyEngine(secure_mode=True)
    with pytest.raises(ValueError, match="gdp states an approximation"):
        engine.accountant = GaussianAccountant()


def test_the_first_step_past_the_planned_ones_says_so_once():
    engine, (model, optimizer, criterion, loader) = with_target()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(loader, model, optimizer, criterion)
    with pytest.warns(UserWarning, match=r"the 4 steps that target_epsilon=3 is for") as caught:
        train(chain(loader, loader), model, optimizer, criterion)
    (warning,) = caught
    assert warning.filename == __file__
    assert optimizer.steps == 12
    said = float(re.search(r"epsilon is ([\d.]+) at delta=0.001", str(warning.message))[1])
    assert 3 < said < engine.get_epsilon(delta=1e-3)


def test_less_noise_than_a_target_needs_is_said():
    _, (model, optimizer, criterion, loader) = with_target()
    optimizer.noise_multiplier *= 0.9
    with pytest.warns(
        UserWarning, match=r"noise_multiplier is below the \S+ that target"
    ) as caught:
        train(loader, model, optimizer, criterion)
    assert len(caught) == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("physical", [None, 2])
def test_stop_ends_a_plain_loop(physical, workers):
    """After the planned steps the loader yields nothing for training."""
    engine, (model, optimizer, criterion, loader) = with_target(
        stop=True, steps=6, epochs=2, loader_options={"num_workers": workers}
    )
    for _ in range(5):
        if physical is None:
            train(loader, model, optimizer, criterion)
            continue
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ) as parts:
            train(parts, model, optimizer, criterion)
    assert optimizer.steps == 12
    assert engine.get_epsilon(delta=1e-3) <= 3
    model.eval()
    assert len(list(loader)) == 6  # which no step uses


def test_stop_in_the_middle_of_an_epoch():
    """A step on a batch from elsewhere took a place."""
    _, (model, optimizer, criterion, loader) = with_target(stop=True)
    batches = [loader.dataset[:5] for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(batches, model, optimizer, criterion)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"the 4 steps that target_epsilon=3 .* stop=True"):
        train(batches[:1], model, optimizer, criterion)
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.steps == 4


@pytest.mark.parametrize("new_keys", [False, True])
def test_planned_steps_of_a_resumed_run(path, new_keys):
    """They count from the beginning of the training."""
    engine, (model, optimizer, criterion, loader) = with_target(stop=True)
    batches = iter(loader)
    for _ in range(3):
        train([next(batches)], model, optimizer, criterion)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, (model, optimizer, criterion, loader) = with_target(stop=True)
    again.load_checkpoint(path=path, module=model, optimizer=optimizer, new_keys=new_keys)
    for _ in range(3):
        train(loader, model, optimizer, criterion)
    assert optimizer.steps == 4
    assert 2.98 < again.get_epsilon(delta=1e-3) <= 3


@pytest.mark.parametrize("spent", [True, False])
def test_a_target_that_a_load_leads_above_is_said(path, spent):
    """A longer training is planned with more noise, which the steps before it did not have."""
    engine, (model, optimizer, criterion, loader) = with_target(target_epsilon=3 if spent else 1.5)
    train(islice(loader, 4 if spent else 1), model, optimizer, criterion)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, (model, optimizer, criterion, loader) = with_target(epochs=2, stop=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.load_checkpoint(path=path, module=model, optimizer=optimizer)
    above = [one for one in caught if "target_epsilon=3 was not computed" in str(one.message)]
    while optimizer.steps < 8:
        train(loader, model, optimizer, criterion)
    ended = again.get_epsilon(delta=1e-3)
    assert (len(above), ended > 3) == (spent, spent)
    if spent:
        assert above[0].filename == __file__
        said = re.search(r"epsilon is ([\d.]+) .* and ends at ([\d.]+):", str(above[0].message))
        assert float(said[1]) == pytest.approx(engine.get_epsilon(delta=1e-3), rel=1e-3)
        assert float(said[2]) == pytest.approx(ended, rel=1e-3)


def test_a_checkpoint_of_prv_goes_on_with_pld(path):
    """It was the default, and keeps the same history."""
    engine, _, (model, optimizer, criterion, loader) = made("prv")
    train(loader, model, optimizer, criterion)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, _, (model, optimizer, *_) = made("pld")
    again.load_checkpoint(path=path, module=model, optimizer=optimizer)
    assert again.accountant.mechanism() == "pld"
    assert again.accountant.history == engine.accountant.history == [(1.0, 0.25, 4)]
    assert 2 < again.get_epsilon(1e-3) < 3.5
    other, _, (model, optimizer, *_) = made("rdp")
    with pytest.raises(ValueError, match=r'is prv .* and rdp .*PrivacyEngine\(accountant="prv"\)'):
        other.load_checkpoint(path=path, module=model, optimizer=optimizer)
