"""`make_private(.., noise_mechanism=CorrelatedNoise(bands=b), sampling="cyclic")` end to end.

What it has in common with independent noise is in test_samplings.py.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import CorrelatedNoise, PrivacyEngine
from dp_clipping.accounting.mechanism import ZERO_OUT
from dp_clipping.noise.gaussian import NoiseStream, standard_normal
from tests.dp_clipping import test_samplings as samplings
from tests.dp_clipping.noise.test_correlated import dense
from tests.support import saved_runs
from tests.support.saved_runs import load, save, state, train

DELTA, EPOCH = samplings.DELTA, samplings.EPOCH

pytestmark = pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed")


def build(**changes):
    return saved_runs.build(**samplings.CORRELATED | changes)


def released(
    steps: int, run, key: bytes, name: str = "weight", rest: float | None = None
) -> torch.Tensor:
    """Rows of W z of one parameter [steps, numel], in units of σC."""
    numel = run.model.network.weight.numel()
    z = [
        standard_normal(
            numel, NoiseStream.derive(key, step=t, parameter=name, share=0), device="cpu"
        )
        for t in range(steps)
    ]
    return dense(3, steps, rest) @ torch.stack(z).double()


def zeros(**changes):
    """A run whose gradients are zero, so that its steps are noise: of σC = 1, lr 1."""
    network = nn.Linear(40, 25, bias=False)
    engine = PrivacyEngine(accountant="rdp")
    dataset = TensorDataset(torch.zeros(8, 40), torch.zeros(8, dtype=torch.long))
    options = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "expected_batch_size": 1}
    made = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        data_loader=DataLoader(dataset, batch_size=2), **samplings.CORRELATED | options | changes,
    )  # fmt: skip
    return engine, *made


@pytest.mark.parametrize("epochs", [None, 5])
def test_steps_have_the_rows_of_the_dense_matrix(epochs):
    noise = CorrelatedNoise(3, epochs)
    rest = None if epochs is None else sum(noise.in_epochs_of(4).weights(3))
    assert rest != 0.375, "that of √(1 - x)"
    engine, model, optimizer, criterion, loader = zeros(noise_mechanism=noise)
    (run,) = engine._runs
    weight = run.model.network.weight
    found = []
    for _ in range(2):
        for x, y in loader:
            before = weight.detach().clone()
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((before - weight.detach()).flatten())
    expected = released(len(found), run, run.keys.noise, rest=rest)
    for row, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(row.double(), exact, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("epochs", [None, 3])
@pytest.mark.parametrize("new_keys", [False, True])
def test_a_resumed_run_takes_back_noise_of_before(new_keys, epochs, tmp_path):
    noise = CorrelatedNoise(3, epochs)
    run = build(noise_mechanism=noise)
    train(run, 4)
    save(run, tmp_path / "file")
    train(run, 3)
    again = build(seed=1, noise_mechanism=noise)
    load(again, tmp_path / "file", new_keys=new_keys)
    train(again, 3)
    assert (state(again) == state(run)) != new_keys
    parts = [[(0.8, 1 / 6, 4)], [(0.8, 1 / 6, 3)]] if new_keys else [[(0.8, 1 / 6, 7)]]
    assert samplings.epsilon(again) == again.engine._mechanism.epsilon(parts, DELTA)


@pytest.mark.parametrize("ids", [None, [i // 3 * 2 for i in range(24)]])
def test_units_are_protected_as_a_whole(ids):
    run = build(examples_per_unit=4, unit_ids=ids)
    train(run, 3)
    batches = run.engine._runs[0].settings["sample_rate"] ** -1
    assert samplings.epsilon(run) == run.engine._mechanism.epsilon([[(0.8, 1 / batches, 3)]], DELTA)


# bands, batches of an epoch, σ, [steps], ε at δ = 1e-5, with jax_privacy 2.0.0 and dp-accounting
# 0.6.0, s as in noise/test_correlated: dp_accounting.get_epsilon_gaussian(σ / s, 1e-5)
REFERENCE = [
    (1, 20, 2.0, 60, 3.70863493), (8, 20, 2.0, 60, 5.61691171), (8, 20, 5.0, 1, 0.72552175),
    (16, 50, 4.0, 1000, 8.11036124), (3, 6, 0.8, 7, 10.24330075), (64, 20, 10.0, 65, 1.40737601),
]  # fmt: skip


@pytest.mark.parametrize(("bands", "batches", "sigma", "steps", "expected"), REFERENCE)
def test_epsilon_is_that_of_one_gaussian_mechanism(bands, batches, sigma, steps, expected):
    run = build(noise_mechanism=CorrelatedNoise(bands))
    found = run.engine._mechanism.epsilon([[(sigma, 1 / batches, steps)]], 1e-5)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_statement_says_what_it_is():
    run = build()
    train(run, EPOCH + 1)
    statement = run.engine.privacy_statement(DELTA)
    assert (statement.relation, statement.sampler) == (ZERO_OUT, "cyclic")
    assert "correlated noise of 3 bands" in statement.accountant
    assert statement.epsilon == run.engine.get_epsilon(DELTA)
    independent = samplings.build("cyclic")
    train(independent, EPOCH + 1)
    assert statement.epsilon > independent.engine.get_epsilon(DELTA)  # noise adds up to less


@pytest.mark.parametrize(
    ("name", "value"),
    [("noise_multiplier", 0.9), ("max_grad_norm", 0.6), ("noise_multiplier", np.float32(0.5))],
)
def test_another_scale_is_refused_before_the_step(name, value):
    run = build()
    train(run, 2)
    before, spent = state(run), samplings.epsilon(run)
    setattr(run.optimizer, name, value)
    with pytest.raises(ValueError, match=rf"{name} was .* leave its scheduler out.*\"gaussian\""):
        train(run, 1)
    assert samplings.epsilon(run) == spent
    assert run.optimizer.steps == 2
    setattr(run.optimizer, name, {"noise_multiplier": 0.8, "max_grad_norm": 0.7}[name])
    run.optimizer.zero_grad()
    assert state(run) == before
    train(run, 1)


def test_an_engine_counts_one_mechanism(tmp_path):
    run = build()
    train(run, 1)
    for other in (CorrelatedNoise(4), CorrelatedNoise(3, epochs=1), "gaussian"):
        with pytest.raises(ValueError, match="use a PrivacyEngine for each"):
            build(engine=run.engine, noise_mechanism=other)
    save(run, tmp_path / "file")
    with pytest.raises(ValueError, match=r"noise_mechanism is correlated noise of 3 bands .* 4 ba"):
        load(build(noise_mechanism=CorrelatedNoise(4)), tmp_path / "file", new_keys=True)
    planned = build(noise_mechanism=CorrelatedNoise(3, epochs=1))
    with pytest.raises(ValueError, match=r"of 3 bands in the checkpoint .* 3 bands for 1 epochs"):
        load(planned, tmp_path / "file", new_keys=True)


def test_epochs_of_another_loader_are_refused():
    noise = CorrelatedNoise(3, epochs=1, batches=EPOCH + 1)
    with pytest.raises(ValueError, match=f"and an epoch has {EPOCH}: leave batches out"):
        build(noise_mechanism=noise)
