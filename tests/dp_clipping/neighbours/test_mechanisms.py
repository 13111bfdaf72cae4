"""Each noise, sampling, way of clipping, kind of unit and division of a batch, with the others.

A value that is added to an axis is in the tests. One that is added to `accounting.proofs.PAGES`,
which has all options of `make_private`, fails until it is here.
"""

import pytest
import torch
from torch import nn

from dp_clipping import MODES, CorrelatedNoise, register_clipping_function
from dp_clipping.accounting.proofs import PAGES, REGISTERED
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from tests.dp_clipping.neighbours.replay import HOSTILE, Row, check, make
from tests.support.engine import register_noise
from tests.support.turns import in_turn

pytestmark = [
    pytest.mark.filterwarnings("ignore:poisson_sampling=False"),
    pytest.mark.filterwarnings("ignore:a dataset of"),
]
EXAMPLES, EXPECTED, C, CLASSES = 9, 4, 0.7, 3
USERS = [0, 1, 2, 3, 0, 2, 3, 4, 4]  # the last one has two examples
POISSON = {"sample_rate": 0.6, "steps": 4}
CYCLE = {"steps": 2}
FAST = 1  # kinds of units, others for the next noise
EPOCHS = 2  # of samplings that have epochs


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def samples() -> list:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 4, generator=draw)
    return list(zip(x, torch.randint(CLASSES, (EXAMPLES,), generator=draw), strict=True))


def adaptive(clip: dict) -> dict:
    limits = clip.get("max_grad_norm", C)
    limits = [C / 2**0.5] * 2 if clip.get("clipping") == "per_layer" and limits == C else limits
    return {"adaptive_threshold": AdaptiveThreshold(
        limits, expected_batch_size=EXPECTED, count_std=4.0
    )}  # fmt: skip


TRUNCATED = {"sampling": "truncated_poisson", "max_batch_size": 3}
NOISES = {
    "poisson": POISSON,
    "truncated": POISSON | TRUNCATED,
    "balls in bins": CYCLE | {"sampling": "balls_in_bins"},
    "cyclic": CYCLE | {"sampling": "cyclic"},
    "correlated": CYCLE | {"sampling": "cyclic", "noise_mechanism": CorrelatedNoise(3)},
    "planned": CYCLE | {"sampling": "cyclic", "noise_mechanism": CorrelatedNoise(3, epochs=2)},
    "registered": POISSON | {"noise_mechanism": "normal of neighbours"},
    "secure": POISSON | {"secure": True},
    "none": POISSON | {"noise_multiplier": 0.0},
    "adaptive": POISSON | {"adaptive": True},
    "adaptive truncated": POISSON | TRUNCATED | {"adaptive": True},
    "adaptive balls in bins": CYCLE | {"sampling": "balls_in_bins", "adaptive": True},
    "adaptive cyclic": CYCLE | {"sampling": "cyclic", "adaptive": True},
}
CLIPPINGS = {
    "flat": {},
    "per layer": {"clipping": "per_layer"},
    "thresholds": {"clipping": "per_layer", "max_grad_norm": [0.3, 0.4]},
    "automatic": {"clipping_function": "automatic"},
    "automatic per layer": {"clipping_function": "automatic", "clipping": "per_layer"},
    "registered": {"clipping_function": "half of neighbours"},
}
UNITS = {
    "single": {},
    "consecutive": {"examples_per_unit": 2},
    "users": {"examples_per_unit": 2, "unit_ids": USERS},
    "some of users": {"examples_per_step": 1, "unit_ids": USERS},
    "some of two": {"examples_per_step": 1, "examples_per_unit": 2},
    "views": {"views": 2},
    "views of users": {"views": 2, "examples_per_unit": 2, "unit_ids": USERS},
}
PARTS = {
    "whole": None,
    "microbatches": {"max_physical_batch_size": 4},
    "padded": {"max_physical_batch_size": 4, "pad_batches": True},
    "by hand": "by hand",
}
PRIVATE = {mode: {"grad_sample_mode": mode} for mode in MODES if mode != "no_dp"}
AXES = {"noise": NOISES, "clip": CLIPPINGS, "units": UNITS, "parts": PARTS, "mode": PRIVATE}
ALONE = {  # which go with few others
    "the loader's own batches": {"poisson_sampling": False, "batch_size": 3},
    "made up": POISSON | {"rand_on_empty": True, "sample_rate": 0.2},
    "sum": POISSON | {"loss_reduction": "sum", "criterion": nn.CrossEntropyLoss(reduction="sum")},
    "unwrapped": POISSON | {"wrap_model": False},
}


def arguments(noise: dict, clip: dict, more: dict) -> dict:
    own = {name: value for name, value in noise.items() if name not in ("secure", "adaptive")}
    own |= adaptive(clip) if noise.get("adaptive") else {}
    shared = {"noise_multiplier": 1.0, "max_grad_norm": C, "expected_batch_size": EXPECTED}
    return shared | {"criterion": nn.CrossEntropyLoss()} | own | clip | more


def row_of(noise: str, clip: str, units: str, parts: str, mode: str) -> Row:
    of_noise, of_units = NOISES[noise], UNITS[units]
    users = of_units.get("unit_ids")
    if parts == "by hand" and of_units:  # units of several rows are divided by the manager alone
        parts = "microbatches"
    if users is None and of_units.get("examples_per_unit", 1) > 1:
        users = [i // 2 for i in range(EXAMPLES)]
    last = EXAMPLES - 1 if users is None else max(users)
    return Row(
        f"{noise}, {clip}, {units}, {parts}, {mode}", network, samples(),
        lambda: arguments(of_noise, CLIPPINGS[clip], of_units | PRIVATE[mode]),
        units=users, removed=((last, 1.0), (last, HOSTILE), (last, float("nan"))),
        parts=PARTS[parts], epochs=EPOCHS if "sample_rate" not in of_noise else 1,
        secure=of_noise.get("secure", False), is_exact=clip in ("flat", "automatic"),
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def own():
    """A noise and a clipping function of a user's own."""
    register_noise("normal of neighbours")
    register_clipping_function(
        "half of neighbours", lambda norms, limit: (0.5 * limit / norms).clamp(max=1), bound=0.5
    )


def turned(n: int, axis: dict) -> str:
    return list(axis)[n % len(axis)]


def chosen(noise: str, units: str, shift: int) -> Row:
    """Returns a row with this noise and these units, and the other axes in turn."""
    n, k = list(NOISES).index(noise), list(UNITS).index(units)
    return row_of(
        noise, turned(n + k + shift, CLIPPINGS), units, turned(n + 2 * k + shift, PARTS),
        turned(2 * n + k + shift, PRIVATE),
    )  # fmt: skip


@pytest.mark.parametrize(("noise", "units"), in_turn(NOISES, list(UNITS), fast=FAST))
def test_noise_and_units(noise, units):
    check(chosen(noise, units, 0))


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(1, 4))
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("noise", NOISES)
def test_all_of_noise_and_units(noise, units, shift):
    check(chosen(noise, units, shift))


def alone(name: str) -> Row:
    last = EXAMPLES - 1
    return Row(
        name, network, samples(), lambda: arguments(ALONE[name], {}, {}),
        removed=((last, 1.0), (last, HOSTILE)),
    )  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_others(name):
    check(alone(name))


NOT_HERE = {  # and the accountants, which are no part of a step
    ("grad_sample_mode", "no_dp"),  # clips nothing and adds no noise
    ("layers", REGISTERED),  # in test_layers.py
}


def test_each_option_is_in_a_fast_row():
    pairs = [p.values for p in in_turn(NOISES, list(UNITS), fast=FAST) if not p.marks]
    rows = [chosen(noise, units, 0) for noise, units in pairs]
    names = {name for row in rows for name in row.name.split(", ")}
    assert names == {name for axis in AXES.values() for name in axis}
    rows += [alone(name) for name in ALONE]
    engines = [make(row, {}).engine for row in rows]
    seen = {option for one in engines for option in one._options_of(one._runs[-1]).items()}
    known = {(name, value) for name, pages in PAGES.items() for value in pages}
    assert {key for key in known - seen if key[0] != "accountant"} == NOT_HERE
