"""Tests which arguments of `make_private` are public."""

from dp_clipping.clipping import coefficients
from tests.support import engine


def test_a_registered_function_is_public_by_what_it_computes(monkeypatch):
    """Ranks and checkpoints compare what it computes."""
    monkeypatch.setattr(coefficients, "_REGISTERED", {})
    coefficients.register_clipping_function("mine", lambda norms, limit: limit / norms)
    run = engine.build(clipping_function="mine")
    name = run.engine._runs[0].settings["clipping_function"]
    assert name == coefficients.described("mine") != "mine"
