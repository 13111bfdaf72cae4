"""Rates of a device: what is kept of them, who measures, and that they are the plan's own."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dp_clipping.kernels.gradient import gradient_and_squares_plain
from dp_clipping.kernels.launch import tuning
from dp_clipping.planning import calibration
from dp_clipping.planning.calibration import rates_of
from dp_clipping.planning.cost_model import (
    ALGORITHMS,
    LinearShape,
    Rates,
    default_rates,
    predict,
    steps_of,
)

DEVICE = torch.device("cuda")
FOUND = replace(
    Rates(), product=1e14, gram=2e14, weighted=3e14, single=0.25, bandwidth=1e12, processors=66
)


@pytest.fixture(autouse=True)
def half_an_h200(tmp_path, monkeypatch):
    """A device that is not there, an empty cache folder, and rates that nobody remembers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DP_CLIPPING_CALIBRATE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Half an H200")
    properties = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    rates_of.cache_clear()
    yield
    rates_of.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """Which devices were measured; all have the rates FOUND."""
    devices = []

    def measure(device):
        devices.append(device)
        return FOUND

    monkeypatch.setattr(calibration, "measure", measure)
    return devices


def path() -> Path:
    return tuning.path_of(calibration.FILE)


def content() -> dict:
    return json.loads(path().read_text())


# ---- what is kept -------------------------------------------------------------------------------


def test_the_folder(tmp_path, monkeypatch):
    assert path() == tmp_path / "dp_clipping" / "rates.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(path()) == "/home/somebody/.cache/dp_clipping/rates.json"


def test_kept_rates_come_back():
    assert calibration.stored(DEVICE) is None
    calibration.store(DEVICE, FOUND)
    assert calibration.stored(DEVICE) == FOUND
    assert [entry.name for entry in path().parent.iterdir()] == ["rates.json"]


def test_devices_and_versions_have_rates_of_their_own(monkeypatch):
    calibration.store(DEVICE, FOUND)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "another")
    assert calibration.stored(DEVICE) is None
    calibration.store(DEVICE, replace(FOUND, gram=4e14))
    assert calibration.stored(DEVICE).gram == 4e14
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert calibration.stored(DEVICE) is None
    assert len(content()) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "\x00", '{"a": 1}', "KEY:[1]", "KEY:{}", "KEY:null"], ids=repr
)
def test_files_that_hold_something_else_count_as_none(text, measured):
    key = json.dumps(tuning.key_of(DEVICE))
    path().parent.mkdir()
    path().write_text(text if text[:3] != "KEY" else f"{{{key}: {text[4:]}}}")
    assert calibration.stored(DEVICE) is None
    assert rates_of(DEVICE) == default_rates(DEVICE)
    calibration.calibrate(DEVICE)
    assert calibration.stored(DEVICE) == FOUND


@pytest.mark.parametrize("value", ["1e14", True, 0.0, -1.0, float("nan"), float("inf"), [1.0]])
@pytest.mark.parametrize("name", calibration.MEASURED)
def test_what_is_no_rate_counts_as_none(name, value):
    calibration.store(DEVICE, FOUND)
    values = content()
    values[tuning.key_of(DEVICE)][name] = value
    path().write_text(json.dumps(values))
    assert calibration.stored(DEVICE) is None


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, measured):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="are not stored"):
        assert calibration.calibrate(DEVICE) == FOUND


# ---- who measures -------------------------------------------------------------------------------


def test_the_defaults_are_an_h200s_by_multiprocessors(measured):
    rates = rates_of(DEVICE)
    assert rates.processors == 66
    for name in ("product", "gram", "weighted", "bandwidth"):
        assert getattr(rates, name) == pytest.approx(getattr(Rates(), name) / 2)
    assert rates.single == Rates().single
    assert rates_of(torch.device("cpu")) == Rates()
    assert measured == []


def test_kept_rates_come_before_the_defaults():
    calibration.store(DEVICE, FOUND)
    assert rates_of(DEVICE) == FOUND


def test_the_environment_asks_for_measuring_once(monkeypatch, measured):
    monkeypatch.setenv("DP_CLIPPING_CALIBRATE", "1")
    assert rates_of(DEVICE) == FOUND
    rates_of.cache_clear()  # as in a new process
    assert rates_of(DEVICE) == FOUND
    assert measured == [DEVICE]


def test_the_command(monkeypatch, measured, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for before in ("by default", "kept"):
        assert calibration.main() == 0
        out = capsys.readouterr().out
        assert before in out
        assert all(name in out for name in calibration.MEASURED)
        assert str(path()) in out
    assert len(measured) == 2  # whoever asks by command wants new ones


def test_the_command_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert calibration.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err


# ---- measuring ----------------------------------------------------------------------------------


def test_measured_rates_predict_what_was_measured(monkeypatch):
    """Times that a device of the rates FOUND would take give these rates back."""
    cpu = torch.device("cpu")
    free = {name: float("inf") for name in ("product", "gram", "weighted", "bandwidth")}
    monkeypatch.setattr(calibration, "SHAPES", ((2, 4096, 256, 512), (3, 2048, 128, 256)))
    monkeypatch.setattr(calibration, "SINGLE_SHAPE", (2, 512, 128, 256))
    shapes = iter(calibration.SHAPES)

    def seconds(calls, device):
        half = "single" not in calls
        batch_size, tokens, outputs, inputs = next(shapes) if half else calibration.SINGLE_SHAPE
        size = 2 if half else 4
        use = LinearShape("layer", batch_size, tokens, inputs, outputs, size, size)

        def alone(algorithm, name):
            rates = replace(FOUND, **free | {name: getattr(FOUND, name), "step": 0.0})
            extra = 0.0 if name == "gram" else steps_of(use, FOUND)
            return predict(use, algorithm, rates).seconds + extra

        if not half:
            return {"single": alone("gradient", "product")}
        return {
            "product": alone("gradient", "product"),
            "gram": calibration.GRAM_LAYERS * alone("width", "gram"),
            "weighted": alone("input_length", "weighted"),
            "bandwidth": (use.gradient_bytes + 4 * inputs * outputs) / FOUND.bandwidth,
        }

    monkeypatch.setattr(calibration, "gradient_and_squares", gradient_and_squares_plain)
    monkeypatch.setattr(calibration, "_seconds", seconds)
    rates = calibration.measure(cpu)
    for name in calibration.MEASURED:
        assert getattr(rates, name) == pytest.approx(getattr(FOUND, name)), name
    use = LinearShape("layer", 8, 512, 1024, 1024, 2, 2)
    for algorithm in ALGORITHMS:
        predicted = predict(use, algorithm, rates).seconds
        assert predicted == pytest.approx(predict(use, algorithm, FOUND).seconds)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    rates = calibration.measure(torch.device("cuda"))
    assert rates.bandwidth > 1e11
    assert 1e13 < rates.product < 3e15
    assert 1e13 < rates.gram < 3e15
    assert 1e13 < rates.weighted < 3e15
    assert 0 < rates.single < 1
