"""Programs written for Opacus are told the call that works; test_from_opacus.py has all names."""

import io

import pytest

from dp_clipping import PrivacyEngine
from dp_clipping.arguments import opacus_names
from tests.dp_clipping import test_engine as engine


def test_three_values_are_told_of_the_fourth():
    made = PrivacyEngine().make_private(**engine.arguments())
    with pytest.raises(ValueError, match=r"model, optimizer, criterion, loader = engine\.make_"):
        model, optimizer, loader = made
    model, optimizer, criterion, loader = made
    assert list(made) == [model, optimizer, criterion, loader] == [*made]
    first, *others = made
    assert first is model
    assert len(others) == 3


@pytest.mark.parametrize("name", opacus_names.ARGUMENTS)
def test_arguments_of_adaptive_clipping(name):
    with pytest.raises(TypeError, match=rf"{name} .*adaptive_threshold=AdaptiveThreshold\("):
        PrivacyEngine().make_private(**engine.arguments(), **{name: 0.5})


@pytest.mark.parametrize("name", ["target_epsilon", "target_delta", "epochs"])
def test_a_target_has_a_call_of_its_own(name):
    with pytest.raises(
        TypeError, match=rf"no {name}: .*make_private_with_epsilon\(target_epsilon="
    ):
        PrivacyEngine().make_private(**engine.arguments(), **{name: 1})


def test_adaptive_clipping():
    with pytest.raises(ValueError, match=r"clipping 'adaptive' .*adaptive_threshold=Adaptive"):
        PrivacyEngine().make_private(**engine.arguments() | {"clipping": "adaptive"})


def test_the_network_answers_first():
    """A network that has a method of such a name keeps it."""
    net = engine.arguments()["module"]
    net.validate = lambda: "own"
    arguments = engine.arguments() | {"module": net}
    arguments["optimizer"] = type(arguments["optimizer"])(net.parameters(), lr=0.1)
    model, *_ = PrivacyEngine().make_private(**arguments)
    assert model.validate() == "own"
    assert model._module is net
    with pytest.raises(AttributeError, match=r"model\.cleanup .*model\.to_standard_module\(\)"):
        model.cleanup()


@pytest.mark.parametrize("method", ["save_checkpoint", "load_checkpoint"])
def test_an_open_file_is_told_a_name(method):
    made = PrivacyEngine()
    model, *_ = made.make_private(**engine.arguments())
    with pytest.raises(ValueError, match=r'path is a BytesIO, .*save_checkpoint\(path="run.pt"'):
        getattr(made, method)(path=io.BytesIO(), module=model)
