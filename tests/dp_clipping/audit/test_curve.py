"""The curve ε(δ) that an account states."""

import copy

import pytest
from opacus.accountants import create_accountant

from dp_clipping.audit.curve import curve_of

HISTORY = [(1.5, 0.2, 20)]


@pytest.mark.parametrize("name", ["prv", "rdp", "gdp"])
def test_its_points_are_those_of_the_accountant(name):
    accountant = create_accountant(mechanism=name)
    before = copy.deepcopy(accountant.history)
    curve = curve_of(accountant, HISTORY)
    assert accountant.history == before
    accountant.history = list(HISTORY)
    for epsilon, delta in curve:
        assert epsilon >= 0
        if delta in (0.1, 0.01, 1e-5):
            assert epsilon == pytest.approx(accountant.get_epsilon(delta), abs=0.03)
    assert len(curve) >= 5
    found = dict((delta, epsilon) for epsilon, delta in curve)
    ordered = [found[delta] for delta in sorted(found)]
    assert ordered == sorted(ordered, reverse=True)
