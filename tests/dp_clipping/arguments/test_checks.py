"""Arguments of the wrong type or out of float32's range: refused by name, on one line."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dp_clipping import BatchMemoryManager, PrivacyEngine
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from tests.support import engine

NO_NUMBERS = ["1.0", None, True, [1.0, "x"], torch.tensor(1.0), 1j, object()]
WRONG = {
    "noise_multiplier": [*NO_NUMBERS, [1.0]],
    "max_grad_norm": [*NO_NUMBERS, {1.0}, "0.5", np.ones(1), (1.0, None)],
    "expected_batch_size": [*(x for x in NO_NUMBERS if x is not None), 0, -1, math.nan, math.inf],
    "gamma": NO_NUMBERS,
    "module": [None, nn.Linear, "net", lambda x: x, {}, torch.jit.script(nn.Linear(4, 3))],
    "data_loader": [None, [1, 2], engine.data(), iter([]), DataLoader],
    "optimizer": [None, torch.optim.SGD, 0.1, "sgd", []],
    "criterion": ["mean", 1, nn.CrossEntropyLoss],
    "noise_generator": [5, "seed", np.random.default_rng(0)],
    "adaptive_threshold": [0.5, True, AdaptiveThreshold],
    "data_parallel_group": [0, "world"],
    "batch_first": [0, None, "yes"],
    "poisson_sampling": [1, None],
    "rand_on_empty": [0, "no"],
    "wrap_model": [1],
    "cuda_graph": [1, None],
    "memory_budget": ["1GB", 1.5, True, -1],
    "tile_size": [16.0, "16", True, 17],
    "clipping": [None, 1, ["flat"]],
    "clipping_function": [None, 1, ["abadi"]],
    "grad_sample_mode": [None, 1, ["ghost"]],
    "norm_algorithm": [None, 1, ["auto"]],
    "norm_reduction": [None, 1, ["sync"]],
    "loss_reduction": [None, 1, ["mean"]],
}


def refused(name, call):
    with pytest.raises(ValueError, match=name) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_make_private(name):
    for value in WRONG[name]:
        arguments = engine.arguments() | {name: value}
        if name == "max_grad_norm" and isinstance(value, list | tuple):
            arguments["clipping"] = "per_layer"
        refused(name, lambda given=arguments: PrivacyEngine().make_private(**given))


def test_a_wrong_type_is_also_a_type_error():
    with pytest.raises(TypeError, match=r"noise_multiplier is '1\.0': give a finite number of 0"):
        engine.build(noise_multiplier="1.0")


@pytest.mark.parametrize("gamma", [1e-50, 1e-39, 1e39, 1e300])
def test_a_gamma_beyond_float32_is_refused(gamma):
    refused("gamma is", lambda: engine.build(clipping_function="automatic", gamma=gamma))
    engine.step(engine.build(gamma=gamma))  # abadi has none


@pytest.mark.parametrize(
    ("name", "values"),
    [("target_epsilon", [0, -1, math.inf, math.nan, "1", None, True]),
     ("target_delta", [0, 1, math.nan, "1e-5", None]),
     ("epochs", [0, -1, 1.5, "3", None, True]),
     ("data_loader", [None, engine.data()]),
     ("noise_multiplier", [1.0])],
)  # fmt: skip
def test_arguments_of_make_private_with_epsilon(name, values):
    for value in values:
        given = engine.arguments() | {"target_epsilon": 1.0, "target_delta": 1e-3, "epochs": 1}
        del given["noise_multiplier"]
        refused(name, lambda given=given | {name: value}: PrivacyEngine()
                .make_private_with_epsilon(**given))  # fmt: skip


@pytest.mark.parametrize("given", [{"accountant": None}, {"accountant": 1}, {"accountant": "pvr"},
                                   {"hide_unprotected": "yes"},
                                   {"hide_unprotected": 1}])  # fmt: skip
def test_arguments_of_the_engine(given):
    refused(next(iter(given)), lambda: PrivacyEngine(**given))


@pytest.mark.parametrize("name", ["expected_batch_size", "quantile", "learning_rate", "count_std",
                                  "lowest", "highest"])  # fmt: skip
def test_arguments_of_the_adaptive_threshold(name):
    for value in ("1", True, [1.0], math.nan, -1.0):
        given = {"expected_batch_size": 6, name: value}
        refused(name, lambda given=given: AdaptiveThreshold(0.5, **given))
    for value in ("1", None, {1.0}, [0.5, "x"], []):
        refused("max_grad_norm", lambda c=value: AdaptiveThreshold(c, expected_batch_size=6))


def test_arguments_of_the_memory_manager():
    run = engine.build()
    given = {"data_loader": run.loader, "max_physical_batch_size": 2, "optimizer": run.optimizer}
    for name, values in (
        ("data_loader", [None, [1], engine.data()]),
        ("max_physical_batch_size", [0, -1, 1.5, math.nan, "2", None, True]),
        ("optimizer", [None, run.optimizer.original_optimizer]),
    ):
        for value in values:
            refused(name, lambda g=given | {name: value}: BatchMemoryManager(**g))


def test_an_optimizer_that_needs_a_closure_is_refused():
    net = engine.network()
    optimizer = torch.optim.LBFGS(net.parameters())
    refused("LBFGS computes the loss several times",
            lambda: engine.build(module=net, optimizer=optimizer))  # fmt: skip


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_a_loader_without_a_length_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    loader = DataLoader(Stream(), batch_size=2)
    refused("data_loader has no length",
            lambda: engine.build(data_loader=loader, poisson_sampling=False))  # fmt: skip


def test_old_names_work_and_warn():
    with pytest.warns(DeprecationWarning, match="release is now hide_unprotected"):
        built = PrivacyEngine(accountant="rdp", release=True)
    assert built.hide_unprotected
    with pytest.warns(DeprecationWarning, match="release is now hide_unprotected"):
        assert built.release
    with pytest.warns(DeprecationWarning, match="data_group is now data_parallel_group"):
        run = engine.build(data_group=None)
    with pytest.warns(DeprecationWarning, match="is now reset_batch_layouts"):
        run.model.forget_layouts()
    with pytest.raises(TypeError, match="release is the old name of hide_unprotected"):
        PrivacyEngine(release=True, hide_unprotected=True)
