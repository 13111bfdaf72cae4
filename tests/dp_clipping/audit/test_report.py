"""The report of an audit, and the bounds in it."""

import math

import pytest

from dp_clipping.audit.attacks import Guesses
from dp_clipping.audit.bound import epsilon_lower_bound
from dp_clipping.audit.report import MORE, AuditReport, bounds_of


def gaussian(scale: float):
    """Returns the curve of a mechanism that is perfectly private from twice its noise on."""
    return [(0.0 if scale >= 2 else 50.0, 0.0)]


def test_a_bound_has_its_part_of_the_error():
    good, bad = Guesses("a", "in", 100, 95, 0.5), Guesses("b", "in", 100, 50, 0.5)
    found = bounds_of(1000, [bad, good], gaussian, 1e-5, 0.9, 3.0)
    level = 1 - 0.1 * 0.2 * 0.5
    assert found["guesses"] is good
    assert found["epsilon_lower_bound"] == epsilon_lower_bound(1000, 100, 95, 1e-5, level)
    # At the whole error it would be higher: the parts are paid for.
    assert found["epsilon_lower_bound"] < epsilon_lower_bound(1000, 100, 95, 1e-5, 0.9)


def test_the_least_noise_that_guesses_refute():
    good = Guesses("a", "in", 100, 95, 1.0)
    found = bounds_of(1000, [good], gaussian, 1e-5, 0.95, 3.0)
    assert (found["refuted_noise"], found["curve_guesses"]) == (6.0, good)
    assert 2.0 in MORE
    weak = Guesses("a", "in", 100, 51, 1.0)
    found = bounds_of(1000, [weak], gaussian, 1e-5, 0.95, 3.0)
    assert (found["refuted_noise"], found["curve_guesses"]) == (math.inf, None)


@pytest.fixture
def report():
    guesses = Guesses("likelihood", "in", 100, 60, 0.7)

    def make(bound: float, noise: float) -> AuditReport:
        return AuditReport(
            epsilon=2.0, delta=1e-5, confidence=0.95, noise_multiplier=1.0, sample_rate=0.1,
            steps=7, canaries=1000, included=510, epsilon_lower_bound=bound, guesses=guesses,
            refuted_noise=noise, curve_guesses=None if math.isinf(noise) else guesses,
        )  # fmt: skip

    return make


def test_what_refutes_an_account(report):
    assert report(1.9, 1.5).ok
    assert report(1.9, math.inf).ok
    assert not report(2.1, math.inf).ok
    assert not report(1.0, 1.0).ok
    both = report(2.1, 0.7)
    assert len(both.faults) == 2
    assert "epsilon is at least 2.1, and 2 is stated" in str(both)
    assert "not as private as with noise multiplier 0.7, and 1 is stated" in str(both)
    assert "60 of 100 guesses right (likelihood, in)" in str(both)
    assert "none, up to" in str(report(1.0, math.inf))
