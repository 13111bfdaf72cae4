"""No raw error leaves the package: whatever is given, a message names the argument.

Each argument of what users call is given each value of `WRONG`; nights try pairs of them. What is
taken is trained with for a step: some values fit some arguments.
"""

import inspect
import math
import traceback
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
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
from dp_clipping.integrations.trainer_arguments import PrivacyArguments
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from tests.support import engine
from tests.test_reference import entries, thing

pytestmark = pytest.mark.filterwarnings("ignore")
PACKAGE = Path(dp_clipping.__file__).parent
WRONG = {
    "None": None, "str": "x", "empty": "", "bytes": b"x", "minus": -1, "zero": 0, "float": 2.5,
    "nan": math.nan, "huge": 1e308, "int": 10**400, "digits": 10**5000, "True": True,
    "complex": 1j, "list": [], "names": ["a"], "dict": {}, "object": object(), "class": int,
    "function": lambda: None, "tensor": torch.ones(2, 3), "meta": torch.ones(2, device="meta"),
    "scalar": torch.tensor(1.0), "array": np.ones(3), "module": nn.Linear(2, 2),
    "inf": -math.inf, "numpy": np.float32(-3), "numpy nan": np.float64("nan"),
    "numpy bool": np.bool_(True), "numpy array": np.array(2), "complex tensor": torch.ones(1) * 1j,
    "number": "1.0", "set": {1}, "tuple": (1, "a"), "generator": iter(()), "lone": "\ud800",
    "null": "a\0b",
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


def at_end(**changes: Any) -> None:
    run = engine.build()
    given_ = {"optimizer": run.optimizer, "steps": 3, "delta": 1e-5}
    run.engine.epsilon_at_end(**given_ | changes)


def on_step(**changes: Any) -> None:
    run = engine.build()
    run.engine.on_step(**{"call": lambda metrics: None} | changes)
    engine.step(run)


def checked(**changes: Any) -> None:
    run = engine.build()
    run.engine.check(**{"model": run.model, "batch": engine.data()[:5]} | changes)


def saved(**changes: Any) -> None:
    run = engine.build()
    with TemporaryDirectory() as folder, chdir(folder):
        run.engine.save_checkpoint(**{"path": "run", "module": run.model} | changes)


def loaded(**changes: Any) -> None:
    run = engine.build()
    with TemporaryDirectory() as folder, chdir(folder):
        run.engine.save_checkpoint(path="run", module=run.model)
        run.engine.load_checkpoint(**{"path": "run", "module": run.model} | changes)


def model(name: str, **changes: Any) -> None:
    getattr(engine.build().model, name)(**changes)


def load_state(**changes: Any) -> None:
    run = engine.build()
    run.model.load_state_dict(**{"state_dict": run.model.state_dict()} | changes)


def of_optimizer(name: str, **changes: Any) -> None:
    run = engine.build()
    engine.backward(run, engine.data()[:5])
    getattr(run.optimizer, name)(**changes)


def criterion(**changes: Any) -> None:
    run = engine.build()
    x, y = engine.data()[:5]
    run.criterion(run.model(x), y, **changes).backward()


def backward(**changes: Any) -> None:
    run = engine.build()
    x, y = engine.data()[:5]
    run.criterion(run.model(x), y).backward(**changes)


def of_statement(name: str, **changes: Any) -> None:
    with TemporaryDirectory() as folder, chdir(folder):
        getattr(engine.build().engine.privacy_statement(1e-5), name)(**changes)


def privacy_arguments(**changes: Any) -> None:
    PrivacyArguments(**{"target_epsilon": 3.0, "target_delta": 1e-5} | changes)


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
    "CorrelatedNoise": (
        partial(registered, CorrelatedNoise, {"bands": 2}), ["bands", "epochs", "batches"],
    ),
    "sensitivity": (
        partial(registered, CorrelatedNoise(2).sensitivity, {"steps": 3, "batches": 2}),
        ["steps", "batches"],
    ),
    "weights": (CorrelatedNoise(2).weights, ["count"]),
    "AdaptiveThreshold": (
        partial(
            registered, AdaptiveThreshold, {"max_grad_norm": 1.0, "expected_batch_size": 4.0}
        ),
        arguments_of(AdaptiveThreshold),
    ),
    "epsilon_at_end": (at_end, ["optimizer", "steps", "delta"]),
    "on_step": (on_step, ["call", "delta", "unprotected", "every"]),
    "check": (checked, ["model", "batch", "loss"]),
    "save_checkpoint": (saved, arguments_of(PrivacyEngine.save_checkpoint)),
    "load_checkpoint": (loaded, arguments_of(PrivacyEngine.load_checkpoint)),
    "validate": (PrivacyEngine.validate, ["module"]),
    "is_compatible": (PrivacyEngine.is_compatible, ["module"]),
    "get_compatible_module": (PrivacyEngine.get_compatible_module, ["module"]),
    "skip_checks": (partial(model, "skip_checks"), ["batches"]),
    "model.load_state_dict": (
        load_state, ["state_dict", "strict", "assign"]
    ),
    "optimizer.step": (partial(of_optimizer, "step"), ["closure"]),
    "zero_grad": (partial(of_optimizer, "zero_grad"), ["set_to_none"]),
    "attach_step_hook": (partial(of_optimizer, "attach_step_hook"), ["hook"]),
    "signal_skip_step": (partial(of_optimizer, "signal_skip_step"), ["do_skip"]),
    "optimizer.load_state_dict": (partial(of_optimizer, "load_state_dict"), ["state"]),
    "criterion": (criterion, ["shape"]),
    "backward": (backward, ["gradient", "retain_graph", "create_graph", "inputs"]),
    "statement.save": (partial(of_statement, "save"), ["path"]),
    "statement.write_beside": (partial(of_statement, "write_beside"), ["folder"]),
    "PrivacyArguments": (privacy_arguments, arguments_of(PrivacyArguments.__init__)),
    "optimizer": (set_and_step, ["noise_multiplier", "max_grad_norm", "expected_batch_size"]),
    "get_epsilon": (epsilon, ["delta"]),
    "privacy_statement": (statement, ["delta"]),
    "record_sums": (partial(audited, "record_sums"), arguments_of(PrivacyEngine.record_sums)),
    "audit": (partial(audited, "audit"), arguments_of(PrivacyEngine.audit)),
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


NOT_HERE = {  # which a user does not make, or whose arguments are checked where they are used
    "LinearProduct", "PrivateModel", "PrivateOptimizer", "PrivateCriterion", "PrivateLoss",
    "PoissonLoader", "PrivacyStatement", "Check", "AuditReport", "RecordedSums", "NormStatistics",
    "state_dict", "graphed",
}  # fmt: skip


def test_each_public_callable_is_here():
    names = set()
    for path, members in entries().items():
        if path.startswith("dp_clipping.") and not path.endswith("Trainer"):  # which are theirs
            owner = thing(path)
            made = [(path.rpartition(".")[2], owner), *((m, getattr(owner, m)) for m in members)]
            made = [(name, one) for name, one in made if not inspect.ismethoddescriptor(one)]
            names |= {name for name, one in made if callable(one) and arguments_of(one)}
    assert names - {call.rpartition(".")[2] for call in CALLS} == NOT_HERE


OF_USERS = ("call", "loss", "closure", "hook", "criterion")


def fault_of(call: str, /, **changes: Any) -> str | None:
    """Returns what is wrong with how a call refuses; None if it is taken, or refused by name."""
    try:
        CALLS[call][0](**changes)
    except FileNotFoundError as error:  # as documented
        return None if call == "load_checkpoint" else f"raises {error!r}"
    except Exception as error:
        if any(name in OF_USERS and callable(value) for name, value in changes.items()):
            return None  # what a user's own function raises
        if "Error(s) in loading state_dict" in str(error):
            return None  # PyTorch's, which names the entries
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not isinstance(error, (ValueError, TypeError, NotImplementedError)):
            return f"raises {error!r}"
        if not last.is_relative_to(PACKAGE):
            return f"raises {error!r} in {last}"
        shown = (*changes, f"{call}(", "is taken: give another name", f"leave {call} out")
        shown += ("clipping function 'x'",)  # the name that was given
        shown += tuple(f"{value} is missing" for value in changes.values() if type(value) is str)
        if not any(name in str(error) for name in shown) or "\n" in str(error):
            return f"says {error}"
    return None


LONG = (
    "make_private_with_epsilon", "optimizer", "record_sums", "audit", "epsilon_at_end", "backward",
    "save_checkpoint", "load_checkpoint", "check_clipping_function",
)  # fmt: skip
EACH = 5


def faults_of(call: str, step: int) -> list[str]:
    """`step`: every how many values are tried, others for the next argument."""
    return [
        f"{call}({name}={shown}) {fault}"
        for n, name in enumerate(CALLS[call][1])
        for shown, value in list(WRONG.items())[n % step :: step]
        if (fault := fault_of(call, **{name: value})) is not None
    ]


@pytest.mark.parametrize("call", [call for call in CALLS if call not in LONG])
def test_wrong_values_are_refused_by_name_or_fit(call):
    assert not faults_of(call, EACH)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_each_wrong_value_is_refused_by_name_or_fits(call):
    found = faults_of(call, 1)
    assert not found, "\n".join(found)


@given(st.data())
def test_two_wrong_values_are_refused_by_the_name_of_one(data):
    call = data.draw(st.sampled_from([name for name, (_, names) in CALLS.items() if names[1:]]))
    names = data.draw(st.lists(st.sampled_from(CALLS[call][1]), min_size=2, max_size=2))
    shown = data.draw(st.lists(st.sampled_from([*WRONG]), min_size=2, max_size=2))
    changes = {name: WRONG[value] for name, value in zip(names, shown, strict=True)}
    assert fault_of(call, **changes) is None
