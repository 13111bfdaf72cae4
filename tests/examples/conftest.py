"""Opacus's accountants, without what they compute again and again."""

import functools
from unittest.mock import patch

import pytest
from opacus.accountants.analysis import rdp


@pytest.fixture(autouse=True, scope="session")
def each_divergence_once():
    """A Rényi divergence is a function of rate, noise and order; others do not change with steps.

    A search for the noise, or a report every few steps, asks for the same ones each time: most of
    what these tests took.
    """
    with patch.object(rdp, "_compute_rdp", functools.cache(rdp._compute_rdp)):
        yield
