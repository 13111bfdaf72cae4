"""Comparisons at equal (ε, δ), on few pictures: correlated noise, and examples of a unit a step."""

from collections import Counter

import pytest
import torch

from ddp_by_hand.experiments import correlated_noise, examples_per_step
from ddp_by_hand.experiments.correlated_noise import TUNING_SEED, Split, split_of, tuned
from ddp_by_hand.experiments.examples_per_step import units_of_pictures
from dp_clipping import CorrelatedNoise
from dp_clipping.accounting import cyclic
from dp_clipping.accounting.target_epsilon import noise_multiplier_for

SMALL = "--pictures 256 --filters 2 --seeds 2 --epsilons 8 --learning-rates 4 16"
pytestmark = pytest.mark.filterwarnings(
    "ignore:Optimal order is the largest alpha", "ignore:delta is"
)


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(correlated_noise, "HELD_OUT", 64)
    yield
    torch.set_num_threads(threads)


def test_correlated_and_independent_noise_spend_the_budget(capsys):
    assert correlated_noise.main([*SMALL.split(), "--batches", "8", "--bands", "4"]) == 0
    head, _, independent, *correlated = capsys.readouterr().out.splitlines()
    assert head.split()[:1] == ["ε"]
    assert "independent, poisson" in independent
    for row, name, epochs in zip(correlated, ("√(1 - x)", "planned"), (None, 1), strict=True):
        assert f"4 bands {name}, cyclic" in row
        sigma = float(row.split("cyclic")[1].split()[0])
        spent = cyclic.epsilon([[(sigma, 1 / 8, 8)]], 1e-5, CorrelatedNoise(4, epochs).sensitivity)
        assert 7.9 < spent < 8.02
        assert 0 < float(independent.split()[3]) < sigma


def test_the_rate_that_is_best_on_other_pictures_is_taken():
    split = Split(None, "tuning", "test")
    options = correlated_noise.Options(learning_rates=(1.0, 2.0, 4.0), seeds=2)
    taken = []

    def train(rate, seed, pictures):
        taken.append((rate, seed, pictures))
        return {1.0: 0.5, 2.0: 0.75, 4.0: 0.25}[rate], rate

    rate, runs, _ = tuned(options, split, train)
    assert (rate, runs) == (2.0, [(0.75, 2.0)] * 2)
    assert taken[3:] == [(2.0, 0, "test"), (2.0, 1, "test")]
    assert {one[1:] for one in taken[:3]} == {(TUNING_SEED, "tuning")}


def test_pictures_have_one_use_each():
    split = split_of(256, filters=2)
    features, digits = split.training.tensors
    assert features.shape == (256, 64)
    assert len(digits) == 256
    everything = torch.cat((features, split.tuning[0], split.test[0]))
    assert len(everything.unique(dim=0)) == 256 + 64 + 64
    torch.testing.assert_close(everything.norm(dim=1), torch.ones(len(everything)))


@pytest.mark.slow
def test_units_with_all_and_with_some_examples_spend_the_budget_on_as_many_pictures(capsys):
    words = "--most 8 --rows 16 --steps 4 --drawn 2"
    assert examples_per_step.main([*SMALL.split(), *words.split()]) == 0
    head, _, drawn, whole = capsys.readouterr().out.splitlines()
    assert head.split()[:1] == ["ε"]
    units = len(set(units_of_pictures(examples_per_step.Options(pictures=256, most=8))))
    for row, name, batch in ((drawn, "2", 8), (whole, "all, at most 8", 2)):
        _, shown, of_batch, sigma, *_ = (cell.strip() for cell in row.split("  ") if cell.strip())
        assert (shown, int(of_batch)) == (name, batch)
        expected = noise_multiplier_for(
            target_epsilon=8.0, target_delta=1e-5, sample_rate=batch / units, steps=4,
            accountant="pld", epsilon_tolerance=0.01, alphas=None,
        )  # fmt: skip
        assert float(sigma) == pytest.approx(expected, abs=1e-3)


def test_units_differ_in_size():
    sizes = Counter(units_of_pictures(examples_per_step.Options(pictures=4096, most=64)))
    assert sum(sizes.values()) == 4096
    assert set(sizes.values()) >= {1, 2, 3}
    assert 32 < max(sizes.values()) <= 64
