"""`make_private(.., sampling=)` end to end: batches, accounts, checkpoints, and what is refused."""

import functools

import numpy as np
import pytest
from torch import nn
from torch.utils.data import DataLoader

from dp_clipping import CorrelatedNoise, PrivacyEngine
from dp_clipping.accounting import balls_in_bins, cyclic, truncated_poisson
from dp_clipping.accounting.mechanism import ADD_OR_REMOVE, ZERO_OUT
from tests.support import saved_runs
from tests.support.draws import joined
from tests.support.engine import step
from tests.support.saved_runs import BATCH, SAMPLES, check_resume, data, load, save, state, train
from tests.support.turns import in_turn

DELTA = 1e-3
EPOCH = SAMPLES // BATCH

MOST = 5
SAMPLINGS = {
    "balls_in_bins": {"sampling": "balls_in_bins"},
    "cyclic": {"sampling": "cyclic"},
    "truncated_poisson": {"sampling": "truncated_poisson", "max_batch_size": MOST},
}
CORRELATED = {"noise_mechanism": CorrelatedNoise(bands=3), "sampling": "cyclic"}
RUNS = SAMPLINGS | {"correlated": CORRELATED}
TRUNCATED = pytest.param("truncated_poisson", marks=pytest.mark.slow)  # its ε takes seconds
every_sampling = pytest.mark.parametrize("name", SAMPLINGS)
every_run = pytest.mark.parametrize("name", RUNS)
every_order = pytest.mark.parametrize("name", ["balls_in_bins", "cyclic", "correlated"])
every_sampling_with_epsilon = pytest.mark.parametrize(
    "name", ["balls_in_bins", "cyclic", TRUNCATED]
)
every_run_with_epsilon = pytest.mark.parametrize(
    "name", ["balls_in_bins", "cyclic", "correlated", TRUNCATED]
)

pytestmark = pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed")


@functools.cache
def epsilon_once(entries, *arguments, right=truncated_poisson._epsilon):
    return right(list(entries), *arguments)


@pytest.fixture(autouse=True)
def each_epsilon_once(monkeypatch):
    """ε of truncated batches takes half a second: it is computed once for the same arguments."""
    monkeypatch.setattr(
        truncated_poisson,
        "_epsilon",
        lambda entries, *arguments: epsilon_once(tuple(map(tuple, entries)), *arguments),
    )


def build(name, **changes):
    return saved_runs.build(**RUNS[name] | changes)


def numbers(batch):
    return sorted(batch[0][:, 0].tolist())


def looked_at(run):
    """Returns the batches of an iteration in evaluation, which uses none of them."""
    run.model.eval()
    found = list(run.loader)
    run.model.train()
    return found


def epsilon(run):
    return run.engine.get_epsilon(DELTA)


def test_cyclic_steps_cost_a_unit_once_in_an_epoch():
    run = build("cyclic", noise_multiplier=2.0)
    spent = []
    train(run, EPOCH + 1, after=lambda: spent.append(epsilon(run)))
    assert len(set(spent[:EPOCH])) == 1
    assert spent[0] == cyclic.epsilon([[(2.0, 1 / EPOCH, 1)]], DELTA)
    assert spent[EPOCH] == cyclic.epsilon([[(2.0, 1 / EPOCH, EPOCH + 1)]], DELTA) > spent[0]
    statement = run.engine.privacy_statement(DELTA)
    assert (statement.sampler, statement.relation) == ("cyclic", ZERO_OUT)
    assert "Gaussian mechanism" in statement.accountant
    assert "zero-out" in str(statement)
    assert (statement.steps, statement.sample_rate) == (EPOCH + 1, 1 / EPOCH)


def test_balls_in_bins_cost_less_than_poisson():
    run, poisson = build("balls_in_bins"), saved_runs.build(accountant="prv")
    for one in (run, poisson):
        train(one, 2 * EPOCH)
    assert 0.5 * epsilon(poisson) < epsilon(run) < epsilon(poisson)
    assert epsilon(run) == balls_in_bins.epsilon([[(0.8, 1 / EPOCH, 2 * EPOCH)]], DELTA)
    statement = run.engine.privacy_statement(DELTA)
    assert (statement.sampler, statement.relation) == ("balls_in_bins", ADD_OR_REMOVE)
    assert "privacy loss distribution" in statement.accountant


def test_truncated_batches_have_a_cap_and_its_cost():
    run = build("truncated_poisson", max_batch_size=np.int64(MOST))
    sizes = list(map(len, train(run, 5 * EPOCH)))
    assert max(sizes) == MOST > min(sizes)
    history = [(0.8, 1 / EPOCH, 5 * EPOCH)]
    options = {"units": SAMPLES, "max_batch_size": MOST}
    assert epsilon(run) == truncated_poisson.epsilon([history], DELTA, **options)
    free = truncated_poisson.epsilon([history], DELTA, units=SAMPLES, max_batch_size=99)
    assert epsilon(run) > 1.5 * free
    statement = run.engine.privacy_statement(DELTA)
    assert (statement.sampler, statement.relation) == ("truncated_poisson", ADD_OR_REMOVE)
    assert "at most 5 of 24 units" in statement.accountant


@every_run_with_epsilon
def test_noise_for_a_target(name):
    run, target = build(name), 1.0
    network = nn.Linear(3, 2)
    engine = PrivacyEngine()
    _, optimizer, _, loader = engine.make_private_with_epsilon(
        module=network, optimizer=saved_runs.sgd(network.parameters()), max_grad_norm=1.0,
        data_loader=DataLoader(data(), batch_size=BATCH), target_epsilon=target, epochs=3,
        target_delta=DELTA, **RUNS[name],
    )  # fmt: skip
    assert len(loader) == EPOCH
    mechanism = run.engine._mechanism
    spent = mechanism.epsilon([[(optimizer.noise_multiplier, 1 / EPOCH, 3 * EPOCH)]], DELTA)
    assert target - 0.01 <= spent <= target


@every_order
def test_steps_are_a_public_number_of_batches(name):
    """It does not depend on the size of the data, and one epoch is the default."""
    for samples in (23, 24):
        network = nn.Linear(3, 2)
        model, _, _, loader = PrivacyEngine().make_private_with_epsilon(
            module=network, optimizer=saved_runs.sgd(network.parameters()), max_grad_norm=1.0,
            data_loader=DataLoader(data(samples), batch_size=BATCH), target_epsilon=2.0,
            target_delta=DELTA, steps=5, **RUNS[name],
        )  # fmt: skip
        model.eval()
        batches = list(loader)
        assert len(loader) == len(batches) == 5
        assert sum(len(x) for x, _ in batches) == samples


@every_order
def test_a_batch_that_no_step_used_comes_again(name):
    """Left early or looked at in evaluation, a batch is not in the account and not lost."""
    run = build(name)
    expected = list(map(numbers, looked_at(run)))
    found = []
    for batch in run.loader:
        step(run, batch)
        found.append(numbers(batch))
        if len(found) == 2:
            break
    for batch in run.loader:
        assert numbers(batch) == expected[2]
        break  # it was handed out, and is not used
    for batch in run.loader:
        step(run, batch)
        found.append(numbers(batch))
        if len(found) == EPOCH:
            break
    assert found == expected
    assert run.engine.privacy_statement(DELTA).steps == EPOCH


@every_order
def test_a_step_out_of_order_is_refused_and_changes_nothing(name):
    run = build(name)
    run.model.eval()
    batches = iter(run.loader)
    next(batches)
    x, y = next(batches)
    run.model.train()
    before = state(run)
    with pytest.raises(RuntimeError, match=r"of batch 1 of the loader.* has used batch 0"):
        run.criterion(run.model(x), y).backward()
    run.optimizer.zero_grad()
    assert state(run) == before
    assert run.optimizer.steps == 0
    train(run, EPOCH)


@every_run
def test_another_batch_is_refused(name):
    run = build(name)
    x, y = data().tensors
    run.criterion(run.model(x[:BATCH]), y[:BATCH]).backward()
    with pytest.raises(RuntimeError, match="did not come from the data_loader that make_private"):
        run.optimizer.step()
    assert run.engine.get_epsilon(DELTA) == 0


@every_sampling_with_epsilon
def test_noise_and_thresholds_may_change(name):
    """The account has σ of each step; C is in the noise."""
    run = build(name)
    train(run, 4)
    run.optimizer.noise_multiplier = 1.6
    run.optimizer.max_grad_norm = 0.1
    train(run, 4)
    mechanism = run.engine._mechanism
    assert epsilon(run) == mechanism.epsilon([[(0.8, 1 / 6, 4), (1.6, 1 / 6, 4)]], DELTA)
    assert run.engine.privacy_statement(DELTA).noise_multiplier == [0.8, 1.6]


@pytest.mark.parametrize(("name", "steps"), in_turn(SAMPLINGS, (2, EPOCH, EPOCH + 1), 1))
def test_a_run_is_resumed_bit_for_bit(name, steps, path):
    run, again = check_resume(path, functools.partial(build, name), steps, 7)
    assert again.engine.privacy_statement(DELTA) == run.engine.privacy_statement(DELTA)


@every_order
def test_new_keys_begin_an_epoch(name, path):
    """Its split is another one, so a unit may be in two steps in a row: both are in the account."""
    run = build(name)
    first = train(run, 2)
    save(run, path)
    again = build(name, seed=1)
    load(again, path, new_keys=True)
    epoch = train(again, EPOCH)
    assert sorted(joined(epoch)) == sorted(data().tensors[0][:, 0].tolist())
    assert epoch[:4] != train(run, 4) != first
    parts = [[(0.8, 1 / 6, 2)], [(0.8, 1 / 6, EPOCH)]]
    assert epsilon(again) == again.engine._mechanism.epsilon(parts, DELTA)
    save(again, path)  # and from there with the same key
    third = build(name, seed=2)
    load(third, path)
    assert train(third, EPOCH) == train(again, EPOCH)
    assert epsilon(third) == epsilon(again)


@every_sampling
def test_a_checkpoint_of_another_sampling_is_refused(name, path):
    run = build(name)
    train(run, 1)
    save(run, path)
    for new_keys in (False, True):
        with pytest.raises(ValueError, match=f"sampling is {name} .* and poisson in this run"):
            load(saved_runs.build(), path, new_keys=new_keys)
    poisson = saved_runs.build()
    train(poisson, 1)
    save(poisson, path)
    with pytest.raises(ValueError, match=f"sampling is poisson .* and {name} in this run"):
        load(build(name), path)


@every_run_with_epsilon
def test_two_runs_of_one_engine_add_up(name):
    run = build(name)
    train(run, 2)
    other = build(name, engine=run.engine)
    train(other, 3)
    parts = [[(0.8, 1 / 6, 2)], [(0.8, 1 / 6, 3)]]
    assert epsilon(run) == run.engine._mechanism.epsilon(parts, DELTA)
    train(run, 1)
    parts[0] = [(0.8, 1 / 6, 3)]
    assert epsilon(run) == run.engine._mechanism.epsilon(parts, DELTA)


@every_run
def test_steps_that_somebody_else_counts_are_not_covered(name):
    run = build(name)
    train(run, 1)
    run.engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(RuntimeError, match="steps that no run of this engine has made"):
        epsilon(run)


@every_sampling
def test_an_engine_counts_one_sampling(name):
    run = build(name)
    with pytest.raises(ValueError, match=r"is 'gaussian', and this .* PrivacyEngine for each"):
        saved_runs.build(engine=run.engine)
    with pytest.raises(ValueError, match=r"leave engine\.accountant as it is"):
        run.engine.accountant = saved_runs.build().engine.accountant
    poisson = saved_runs.build()
    with pytest.raises(ValueError, match=f"{name}.* accounted for 'gaussian'"):
        build(name, engine=poisson.engine)
    train(poisson, 1)
    engine = PrivacyEngine(accountant="rdp")
    engine.accountant = poisson.engine.accountant
    with pytest.raises(ValueError, match=f"{name}.* accounted for 'gaussian'"):
        build(name, engine=engine)


def test_a_checkpoint_with_another_cap_or_other_data_is_refused(path):
    run = build("truncated_poisson")
    train(run, 1)
    save(run, path)
    for new_keys in (False, True):
        for changes in ({"max_batch_size": 6}, {"count": SAMPLES + 1}):
            with pytest.raises(ValueError, match=r"max_batch_size is 5|num_samples is 24"):
                load(build("truncated_poisson", **changes), path, new_keys=new_keys)
    with pytest.raises(ValueError, match="no account of both is known"):
        build("truncated_poisson", engine=run.engine, max_batch_size=6)
