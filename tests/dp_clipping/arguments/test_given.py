"""Objects that `make_private` is handed, and names of Opacus that it does not have."""

import io
from fractions import Fraction

import numpy as np
import pytest
from torch.optim import SGD

from dp_clipping import PrivacyEngine
from dp_clipping.clipping import coefficients
from tests.support import engine


@pytest.mark.parametrize("number", [1, np.float32(1.0), np.float64(1.0), np.int64(1), Fraction(1)])
def test_numbers_of_every_kind_are_taken(number):
    run = engine.build(noise_multiplier=number, max_grad_norm=number, expected_batch_size=number)
    engine.step(run)
    own = run.optimizer
    numbers = (own.noise_multiplier, own.max_grad_norm, own.expected_batch_size)
    assert all(x == 1 and type(x) in (int, float) for x in numbers)


def test_a_registered_function_is_public_by_what_it_computes(monkeypatch):
    """Ranks and checkpoints compare what it computes."""
    monkeypatch.setattr(coefficients, "_REGISTERED", {})
    coefficients.register_clipping_function("mine", lambda norms, limit: limit / norms)
    run = engine.build(clipping_function="mine")
    name = run.engine._runs[0].settings["clipping_function"]
    assert name == coefficients.described("mine") != "mine"


class DPOptimizer(SGD):
    """A class of that name which is not Opacus's."""


def test_classes_are_known_by_name_and_library():
    net = engine.network()
    engine.build(module=net, optimizer=DPOptimizer(net.parameters()))


def test_the_network_answers_for_the_model():
    """A network that has a method of such a name keeps it."""
    net = engine.network()
    net.validate = lambda: "own"
    run = engine.build(module=net)
    assert run.model.validate() == "own"
    assert run.model._module is net
    with pytest.raises(AttributeError, match="no attribute 'cleanup'"):
        run.model.cleanup()


@pytest.mark.parametrize("method", ["save_checkpoint", "load_checkpoint"])
def test_an_open_file_is_told_a_name(method):
    made = PrivacyEngine()
    model, *_ = made.make_private(**engine.arguments())
    with pytest.raises(ValueError, match=r'path is a BytesIO: give .* path="run\.pt"'):
        getattr(made, method)(path=io.BytesIO(), module=model)


def test_an_old_name_works_and_warns():
    with pytest.warns(DeprecationWarning, match="release is now hide_unprotected"):
        built = PrivacyEngine(accountant="rdp", release=True)
    assert built.hide_unprotected
    with pytest.warns(DeprecationWarning, match="release is now hide_unprotected"):
        assert built.release
    with pytest.raises(TypeError, match="unexpected keyword argument 'release': PrivacyEngine"):
        PrivacyEngine(release=True, hide_unprotected=True)
