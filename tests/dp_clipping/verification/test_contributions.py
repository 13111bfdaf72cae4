"""`check_clipping_function`: passes what is bounded, and names what is not."""

import pytest
import torch

from dp_clipping import check_clipping_function, register_clipping_function
from dp_clipping.clipping import coefficients as definition
from dp_clipping.clipping.coefficients import LOWEST, coefficients
from dp_clipping.verification import contributions


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Takes back what a test registers."""
    monkeypatch.setattr(definition, "_REGISTERED", {})


@pytest.mark.parametrize(
    ("name", "gamma"), [("abadi", 1.0), ("automatic", 0.01), ("automatic", LOWEST)]
)
def test_those_that_are_built_in(name, gamma):
    assert 0.99 < check_clipping_function(name, gamma=gamma) <= 1


REGISTERED = {
    "smooth": (lambda n, c: c / (n.square() + c.square()).sqrt(), 1.0),
    "bare": (lambda n, c: c / n, 1.0),
    "half": (lambda n, c: (0.5 * c / n).clamp(max=1), 0.5),
    "peak": (lambda n, c: torch.where((n > 4.9) & (n < 5.1), 9.0, (0.3 * c / n).clamp(max=1)), 0.3),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_those_that_are_registered(name):
    fn, bound = REGISTERED[name]
    register_clipping_function(name, fn, bound)
    assert 0.9 * bound < check_clipping_function(name) <= bound


def nonfinite(squares, *rest):
    c = coefficients(squares, *rest)
    return torch.where(squares.isfinite(), c, 1e-3)


def mixing(squares, *rest):
    return coefficients(squares, *rest) * (0.5 if squares.shape[1] > 1 else 1)


WRONG = {
    r"contributes 1.00.* C, and its bound is 1 C": lambda *a: 1.0001 * coefficients(*a),
    "of norm inf has a coefficient": nonfinite,
    "has another coefficient beside": mixing,
    "has the coefficient -": lambda *a: -coefficients(*a),
    r"norm 1e-\d+ contributes": lambda s, c, *_: (
        (c[:, None] / s.sqrt()).clamp(max=1e300).where(s.isfinite(), 0.0)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named(monkeypatch, message):
    monkeypatch.setattr(contributions, "coefficients", WRONG[message])
    with pytest.raises(ValueError, match=message):
        check_clipping_function("abadi")


@pytest.mark.parametrize("dtype", contributions.DTYPES, ids=str)
def test_every_dtype_is_tried(monkeypatch, dtype):
    tried = []

    def note(name, gamma, rows, clip_norm, bound):
        kinds = [rows.isinf().any(), rows.isnan().any(), (rows == 0).all(1).any()]
        tried.append((rows.dtype, clip_norm, all(kinds)))
        return 0.0

    monkeypatch.setattr(contributions, "_largest", note)
    check_clipping_function("abadi")
    limits = {limit for kind, limit, is_hostile in tried if kind == dtype and is_hostile}
    assert limits == set(contributions.CLIP_NORMS)
