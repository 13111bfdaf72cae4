"""No raw error leaves the package: whatever is given, a message names the argument.

Each argument of what users call is given each value of `WRONG`; nights try pairs of them. What is
taken is trained with for a step: some values fit some arguments.
"""

import inspect
import math
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dp_clipping
from dp_clipping import (
    BatchMemoryManager,
    CorrelatedNoise,
    PrivacyEngine,
    check_clipping_function,
    register_clipping_function,
    register_layer,
    register_noise_mechanism,
)
from tests.support import engine

pytestmark = pytest.mark.filterwarnings("ignore")
PACKAGE = Path(dp_clipping.__file__).parent
WRONG = {
    "None": None, "str": "x", "empty": "", "bytes": b"x", "minus": -1, "zero": 0, "float": 2.5,
    "nan": math.nan, "huge": 1e308, "int": 10**400, "digits": 10**5000, "True": True,
    "complex": 1j, "list": [], "names": ["a"], "dict": {}, "object": object(), "class": int,
    "function": lambda: None, "tensor": torch.ones(2, 3), "meta": torch.ones(2, device="meta"),
    "scalar": torch.tensor(1.0), "array": np.ones(3), "module": nn.Linear(2, 2),
}  # fmt: skip


def make_private(**changes: Any) -> None:
    given_ = engine.arguments()
    made = PrivacyEngine(accountant="rdp").make_private(**given_ | changes)
    if "criterion" in changes:  # what a user's own function raises is not the package's
        return
    x, y = engine.data()[:5]
    made[2](made[0](x), y).backward()
    made[1].step()


def with_epsilon(**changes: Any) -> None:
    given_ = engine.arguments() | {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2}
    del given_["noise_multiplier"]
    PrivacyEngine(accountant="rdp").make_private_with_epsilon(**given_ | changes)


def microbatches(**changes: Any) -> None:
    run = engine.build()
    given_ = {"data_loader": run.loader, "max_physical_batch_size": 3, "optimizer": run.optimizer}
    with BatchMemoryManager(**given_ | changes):
        pass


def set_and_step(**changes: Any) -> None:
    run = engine.build()
    for name, value in changes.items():
        setattr(run.optimizer, name, value)
    engine.step(run)


def epsilon(**changes: Any) -> None:
    engine.build().engine.get_epsilon(**changes)


def statement(**changes: Any) -> None:
    engine.build().engine.privacy_statement(**changes)


def audited(name: str, **changes: Any) -> None:
    getattr(PrivacyEngine(), name)(**engine.arguments() | changes)


def registered(call: Callable, defaults: dict, **changes: Any) -> None:
    call(**defaults | changes)


def arguments_of(call: Callable) -> list[str]:
    kinds = inspect.signature(call).parameters.values()
    return [p.name for p in kinds if p.name != "self" and p.kind is not p.VAR_KEYWORD]


CALLS: dict[str, tuple[Callable, list[str]]] = {
    "make_private": (make_private, arguments_of(PrivacyEngine.make_private)),
    "make_private_with_epsilon": (with_epsilon, [
        "target_epsilon", "target_delta", "epochs", "epsilon_tolerance", "alphas", "stop",
        "sample_rate", "steps", "max_grad_norm",
    ]),
    "PrivacyEngine": (PrivacyEngine, arguments_of(PrivacyEngine.__init__)),
    "BatchMemoryManager": (microbatches, arguments_of(BatchMemoryManager.__init__)),
    "CorrelatedNoise": (CorrelatedNoise, ["bands"]),
    "optimizer": (set_and_step, ["noise_multiplier", "max_grad_norm", "expected_batch_size"]),
    "get_epsilon": (epsilon, ["delta"]),
    "privacy_statement": (statement, ["delta"]),
    "record_sums": (partial(audited, "record_sums"), ["units", "removed"]),
    "audit": (partial(audited, "audit"), ["canaries", "delta", "confidence"]),
    "check_clipping_function": (
        partial(registered, check_clipping_function, {"name": "abadi", "trials": 1}),
        ["name", "gamma", "trials", "seed"],
    ),
    "register_clipping_function": (
        partial(registered, register_clipping_function, {"name": "abadi", "fn": None}),
        ["name", "fn", "bound"],
    ),
    "register_noise_mechanism": (
        partial(registered, register_noise_mechanism, {"name": "gaussian", "quantile": None}),
        ["name", "quantile", "epsilon"],
    ),
    "register_layer": (
        partial(registered, register_layer, {"cls": nn.Linear, "fn": None}),
        ["cls", "fn", "norm", "weighted_sum"],
    ),
}  # fmt: skip


def fault_of(call: str, **changes: Any) -> str | None:
    """Returns what is wrong with how a call refuses; None if it is taken, or refused by name."""
    try:
        CALLS[call][0](**changes)
    except Exception as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not isinstance(error, (ValueError, TypeError, NotImplementedError)):
            return f"raises {error!r}"
        if not last.is_relative_to(PACKAGE):
            return f"raises {error!r} in {last}"
        shown = (*changes, f"{call}(", "is taken: give another name", f"leave {call} out")
        shown += ("clipping function 'x'",)  # the name that was given
        if not any(name in str(error) for name in shown) or "\n" in str(error):
            return f"says {error}"
    return None


LONG = ("make_private_with_epsilon", "optimizer", "record_sums", "check_clipping_function")


@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=[pytest.mark.slow] * (c in LONG)) for c in CALLS]
)
def test_each_wrong_value_is_refused_by_name_or_fits(call):
    found = {
        f"{name}={shown}": fault
        for name in CALLS[call][1]
        for shown, value in WRONG.items()
        if (fault := fault_of(call, **{name: value})) is not None
    }
    assert not found, "\n".join(f"{call}({given_}) {fault}" for given_, fault in found.items())


@given(st.data())
def test_two_wrong_values_are_refused_by_the_name_of_one(data):
    call = data.draw(st.sampled_from([name for name, (_, names) in CALLS.items() if names[1:]]))
    names = data.draw(st.lists(st.sampled_from(CALLS[call][1]), min_size=2, max_size=2))
    shown = data.draw(st.lists(st.sampled_from([*WRONG]), min_size=2, max_size=2))
    changes = {name: WRONG[value] for name, value in zip(names, shown, strict=True)}
    assert fault_of(call, **changes) is None
