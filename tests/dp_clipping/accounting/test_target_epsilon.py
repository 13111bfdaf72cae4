"""The noise multiplier for a target ε: Opacus's own, or a refusal within a second."""

import math

import pytest
from opacus.accountants.utils import get_noise_multiplier

from dp_clipping.accounting.mechanism import Mechanism
from dp_clipping.accounting.target_epsilon import noise_multiplier_for

SETTING = {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 100}


@pytest.mark.parametrize("accountant", ["rdp"])
def test_it_is_the_one_that_opacus_finds(accountant):
    arguments = {**SETTING, "target_epsilon": 2.0, "accountant": accountant}
    assert noise_multiplier_for(**arguments) == get_noise_multiplier(**arguments)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_target_that_needs_no_noise_is_refused_without_a_search(accountant, monkeypatch):
    def search(**_):
        raise AssertionError("the search would take minutes")

    monkeypatch.setattr("opacus.accountants.utils.get_noise_multiplier", search)
    with pytest.raises(ValueError, match=r"target_epsilon is 1e\+06: with noise_multiplier 0.2"):
        noise_multiplier_for(**SETTING, target_epsilon=1e6, accountant=accountant)


def test_a_search_that_fails_names_the_target():
    with pytest.raises(ValueError, match="target_epsilon is 1e-09: accountant rdp finds no noise"):
        noise_multiplier_for(**SETTING, target_epsilon=1e-9, accountant="rdp")


def test_orders_and_tolerance_are_those_of_opacus():
    arguments = {**SETTING, "target_epsilon": 2.0, "accountant": "rdp"}
    options = {"alphas": (6, 12), "epsilon_tolerance": 0.5}
    found = noise_multiplier_for(**arguments, **options)
    assert found == get_noise_multiplier(**arguments, **options)
    assert found != noise_multiplier_for(**arguments)
    with pytest.raises(ValueError, match='alphas are for accountant "rdp"'):
        noise_multiplier_for(**{**arguments, "accountant": "prv"}, alphas=[2])
    with pytest.raises(ValueError, match="epsilon_tolerance is 0: give a finite number above 0"):
        noise_multiplier_for(**arguments, epsilon_tolerance=0)


@pytest.mark.parametrize(
    ("of", "most"),
    [
        (lambda s: 5 / s, 11),
        (lambda s: 5 / s + 3 / s**2, 11),
        (lambda s: math.expm1(3 / s), 12),
        (lambda s: max(0.0, 5 / s - 0.1), 13),
        (lambda s: 30 / s**2 if s > 0.5 else math.inf, 12),
        (lambda s: 20.0 if s < 3 else 0.04, 70),  # a jump, so σ is determined and not ε
    ],
)
@pytest.mark.parametrize("target", [0.05, 0.7, 8.0, 10.0])
def test_the_search_of_a_mechanism_ends_below_its_target_soon(of, most, target):
    asked = []

    def epsilon(histories, delta):
        ((sigma, rate, steps),) = histories[0]
        assert (rate, steps, delta) == (0.01, 100, 1e-5)
        asked.append(sigma)
        return of(sigma)

    sigma = noise_multiplier_for(
        **SETTING, target_epsilon=target, accountant="rdp",
        mechanism=Mechanism(name="made up", epsilon=epsilon),
    )  # fmt: skip
    assert of(sigma) <= target
    assert of(sigma) >= target - 0.01 * min(1, target) or of(sigma * (1 - 1e-8)) > target
    assert len(asked) <= most
    assert (0.2 in asked) == (of(0.4) <= target)  # what takes longest, only where it is needed
