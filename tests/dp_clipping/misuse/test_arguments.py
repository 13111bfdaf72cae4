"""Arguments refused by name, on one line: a row has the arguments and what the message says."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dp_clipping import BatchMemoryManager, CorrelatedNoise, PrivacyEngine
from dp_clipping.noise import mechanisms
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.optimizer import PrivateOptimizer
from tests.support import engine
from tests.support.engine import SAMPLES

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False")
Row = tuple[dict, str]


def rows(*tables: list[Row]) -> pytest.MarkDecorator:
    """Returns the parameters `changes` and `message`; a row is called by its arguments."""
    params = [
        pytest.param(changes, message, id="-".join(f"{k}={v}"[:40] for k, v in changes.items()))
        for table in tables
        for changes, message in table
    ]
    return pytest.mark.parametrize(("changes", "message"), params)


def refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# `make_private`


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Listed(torch.utils.data.Sampler):
    """A sampler of the user's own."""

    def __init__(self, order: Iterable[int]) -> None:
        self.order = [*order]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def loaded(batch_size: int | None = 6, **options: object) -> dict:
    if "batch_sampler" not in options:
        options["batch_size"] = batch_size
    return {"data_loader": DataLoader(engine.data(), **options)}


OF_THREE = [i // 3 for i in range(SAMPLES)]
ADAPTIVE = AdaptiveThreshold(0.5, expected_batch_size=6)
CORRELATED = {"noise_mechanism": CorrelatedNoise(bands=3), "sampling": "cyclic"}
TRUNCATED = {"sampling": "truncated_poisson"}
SECURE = {"secure_mode": True}
FROZEN = engine.network().requires_grad_(False)
PARTLY = engine.network()

MODES: list[Row] = [
    ({"grad_sample_mode": "hooks"}, r"'hooks' is unknown: .*docs/from_opacus.md has those"),
    ({"grad_sample_mode": "hook"}, r"'hook' is unknown: choose one of no_dp, per_sample"),
    ({"norm_reduction": "lazy"}, "'lazy' is unknown: choose one of sync, async, layerwise"),
    ({"clipping": "layers"}, "'layers' is unknown: choose one of flat, per_layer"),
    ({"clipping_function": "x"}, "'x' is unknown: .* of abadi, automatic,.* or call dp_clip"),
    ({"loss_reduction": "sum"}, "loss_reduction is 'sum' and criterion.reduction 'mean'"),
    ({"loss_reduction": "none"}, "'none' is unknown: choose one of mean, sum"),
    ({"criterion": nn.CrossEntropyLoss(reduction="none")}, "both must be"),
]
NUMBERS: list[Row] = [
    ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0: give a finite"),
    ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
    ({"noise_multiplier": math.inf}, "noise_multiplier is inf"),
    ({"noise_multiplier": "1.0"}, r"noise_multiplier is '1\.0': give a finite number of 0"),
    ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0: give a finite number above 0"),
    ({"max_grad_norm": math.inf}, "max_grad_norm is inf"),
    ({"max_grad_norm": math.nan}, "max_grad_norm is nan"),
    ({"max_grad_norm": 1e-20}, "max_grad_norm is 1e-20, .* from 1e-10"),
    ({"max_grad_norm": 1e31}, r"max_grad_norm is 1e\+31, .* from 1e-10 to 1e\+30: give"),
    ({"max_grad_norm": [1.0, 1.0]}, "goes with clipping='per_layer'"),
    ({"max_grad_norm": [], "clipping": "per_layer"}, r"max_grad_norm is \[\]"),
    ({"max_grad_norm": [1.0], "clipping": "per_layer"}, "1 thresholds for 2 clipping"),
    ({"gamma": 0.0}, "gamma is 0.0"),
    *(({"gamma": gamma, "clipping_function": "automatic"}, "gamma is .*, .* from 1e-10")
      for gamma in (1e-50, 1e-39, 1e39, 1e300)),
    *((beyond, "noise of standard deviation .* is beyond float32") for beyond in (
        {"noise_multiplier": 1e39}, {"noise_multiplier": 1e30, "max_grad_norm": 1e30},
        {"noise_multiplier": 1e-30, "max_grad_norm": 1e-9},
    )),
]  # fmt: skip
OBJECTS: list[Row] = [
    ({"module": nn.BatchNorm1d(4)}, r"BatchNorm1d.*mix samples"),
    ({"module": nn.DataParallel(engine.network())}, r"the module \(DataParallel\).*ddp.wrap"),
    ({"module": FROZEN}, "no trainable parameter"),
    ({"optimizer": None}, "optimizer is None: give a torch.optim.Optimizer"),
    ({"optimizer": torch.optim.SGD(engine.network().parameters(), lr=1)},
     "parameters that are not the module's"),
    ({"module": PARTLY, "optimizer": torch.optim.SGD(PARTLY[2].parameters(), lr=1)},
     r"not in the optimizer: 0.weight, 0.bias; freeze"),
    ({"module": engine.network(), "optimizer": torch.optim.LBFGS(engine.network().parameters())},
     "LBFGS computes the loss several times"),
    ({"adaptive_threshold": ADAPTIVE, "grad_sample_mode": "no_dp"}, "is for private modes"),
    ({"adaptive_threshold": ADAPTIVE, "max_grad_norm": 9.0}, "adaptive threshold starts at"),
    ({"target_epsilon": 1.0}, "make_private: .* argument 'target_epsilon': engine"),
]  # fmt: skip
LOADERS: list[Row] = [
    ({"data_loader": DataLoader(Stream())}, "data_loader has no length"),
    ({"data_loader": DataLoader(Stream(), batch_size=2), "poisson_sampling": False},
     "data_loader has no length"),
    (loaded(None), "batch_size=None"),
    (loaded(SAMPLES + 1, drop_last=True), "drop_last=False"),
    (loaded(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
     r"WeightedRandomSampler.*Subset\(dataset, indices\)"),
    (loaded(sampler=DistributedSampler(engine.data(), num_replicas=2, rank=0)),
     "num_replicas 2, and there are 1 data-parallel ranks: give num_replicas=1"),
    *((loaded(**options), f"does not visit each of the {SAMPLES} samples alike") for options in (
        {"batch_sampler": BatchSampler(SequentialSampler(range(12)), 6, False)},
        {"sampler": SubsetRandomSampler([0, 0, *range(22)])},
        {"sampler": SubsetRandomSampler(range(12))},
        {"sampler": RandomSampler(engine.data(), replacement=True)},
        {"sampler": RandomSampler(engine.data(), num_samples=12)},
        {"sampler": Listed([0] * SAMPLES)},
        {"sampler": SequentialSampler(range(12))},
    )),
]  # fmt: skip
UNITS: list[Row] = [
    ({"examples_per_unit": 0}, "examples_per_unit is 0: give a whole number of 1 or more"),
    ({"examples_per_unit": 2.0}, "examples_per_unit is 2.0"),
    ({"examples_per_unit": 4}, "data_loader's batch_size is 6, .* give 4 or 8"),
    ({"examples_per_unit": 4} | loaded(2), "data_loader's batch_size is 2, .* give 4$"),
    ({"examples_per_unit": 4} | loaded(batch_sampler=[[*range(i, i + 4)] for i in range(0, 24, 4)]),
     "no batch_size: give sample_rate="),
    ({"views": 0}, "views is 0: give a whole number of 1 or more: how many rows"),
    ({"views": 2, "poisson_sampling": False}, "views does not go with poisson_sampling=False"),
    ({"views": 2, "rand_on_empty": True}, "leave rand_on_empty out"),
    ({"unit_ids": OF_THREE}, "examples_per_unit=1 is one example.*give examples_per_unit"),
    ({"unit_ids": OF_THREE, "examples_per_unit": 2}, "a unit has 3 examples, and examples_per"),
    ({"unit_ids": OF_THREE, "examples_per_unit": 3, "poisson_sampling": False},
     "unit_ids does not go with poisson_sampling=False"),
    ({"examples_per_unit": 3, "rand_on_empty": True}, "leave rand_on_empty out"),
    ({"examples_per_step": 0, "unit_ids": OF_THREE}, "examples_per_step is 0: give a whole number"),
    ({"examples_per_step": 1.0, "unit_ids": OF_THREE}, "examples_per_step is 1.0"),
    ({"examples_per_step": 1}, "here a unit is one example: give unit_ids"),
    ({"examples_per_step": 4, "examples_per_unit": 3}, "examples_per_step=4 is more than examples"),
    ({"examples_per_step": 4, "unit_ids": OF_THREE}, "batch_size is 6, .* 4 rows of each unit"),
    ({"examples_per_step": 1, "examples_per_unit": 2, "unit_ids": OF_THREE}, "or leave it out and"),
    ({"examples_per_step": 1, "examples_per_unit": 3, "poisson_sampling": False},
     "examples_per_step does not go with poisson_sampling=False"),
    ({"examples_per_step": 2, "unit_ids": OF_THREE, "rand_on_empty": True}, "a unit has 2: leave"),
]  # fmt: skip
RATES: list[Row] = [
    ({"sample_rate": 0}, "sample_rate is 0: give a probability above 0, at most 1"),
    ({"sample_rate": 1.5}, r"sample_rate is 1.5: give a probability"),
    ({"sample_rate": math.nan}, "sample_rate is nan"),
    ({"sample_rate": "0.1"}, "sample_rate is a string|sample_rate is '0.1'"),
    ({"steps": 0}, "steps is 0: give a whole number of 1 or more"),
    ({"steps": 2.5}, "steps is 2.5: give a whole number"),
    (
        {"steps": 3, "poisson_sampling": False},
        "steps does not go with poisson_sampling=False",
    ),
]
SAMPLINGS: list[Row] = [
    *(({"sampling": wrong}, r"sampling .*poisson, ")
      for wrong in ("shuffle", "Poisson", "", None, True, 3, np.str_("balls"))),
    *((sampling | {"poisson_sampling": False}, r"not go with poisson_sampling=False.*leave it out")
      for sampling in ({"sampling": "cyclic"}, {"sampling": "balls_in_bins"},
                       TRUNCATED | {"max_batch_size": 5}, CORRELATED)),
    *((sampling | {"sample_rate": 0.1}, r"does not go with sample_rate.* give steps=")
      for sampling in ({"sampling": "cyclic"}, {"sampling": "balls_in_bins"}, CORRELATED)),
    *((sampling | {"noise_mechanism": "mine"}, r"does not go with noise_mechanism='mine'")
      for sampling in ({"sampling": "cyclic"}, {"sampling": "balls_in_bins"},
                       TRUNCATED | {"max_batch_size": 5})),
    (TRUNCATED, r"max_batch_size is missing: give .*max_batch_size=128"),
    ({"max_batch_size": 5}, r"is for sampling=\"truncated_poisson\", and sampling is 'poisson'"),
    ({"max_batch_size": 5, "sampling": "cyclic"}, "and sampling is 'cyclic': leave it out"),
    *((TRUNCATED | {"max_batch_size": wrong}, "max_batch_size is")
      for wrong in (0, -1, 2.5, True, "5")),
]  # fmt: skip
NOISE: list[Row] = [
    *(({"noise_mechanism": wrong, "sampling": "cyclic"}, r"noise_mechanism .*CorrelatedNoise\(band")
      for wrong in (CorrelatedNoise, 8)),
    ({"noise_mechanism": "laplace"}, r"'laplace' is unknown: .*register_noise_mechanism\("),
    (CORRELATED | {"sampling": "poisson"}, "for which no account .*sampling=\"cyclic\""),
    (CORRELATED | {"sampling": "balls_in_bins"}, "does not go with"),
    (CORRELATED | {"cuda_graph": True}, r"does not go with cuda_graph=True.*\"gaussian\""),
    (CORRELATED | {"adaptive_threshold": ADAPTIVE}, r"with adaptive_threshold.*\"gaussian\""),
    ({"noise_mechanism": "mine", "adaptive_threshold": ADAPTIVE}, "adaptive_threshold.*leave it o"),
    ({"noise_mechanism": "mine", "cuda_graph": True}, "does not go with cuda_graph=True"),
    ({"noise_mechanism": "mine", "fused_step": True}, "does not go with fused_step=True"),
    (SECURE | {"noise_generator": torch.Generator()}, "does not go with noise_generator"),
    (SECURE | {"adaptive_threshold": ADAPTIVE}, "with adaptive_threshold, whose counts"),
    (SECURE | {"cuda_graph": True}, "secure_mode=True does not go with cuda_graph=True"),
    (SECURE | {"fused_step": True}, "secure_mode=True does not go with fused_step=True"),
    (SECURE | {"noise_mechanism": "mine"}, "not go with noise_mechanism='mine'.*'?gaussian"),
    (SECURE | {"module": engine.network().double()}, r"in float64.*module=network\.float"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    """A noise mechanism of the user's own: 'mine'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanisms, "_REGISTERED", {})
        engine.register_noise("mine")
        yield


@rows(MODES, NUMBERS, OBJECTS, LOADERS, UNITS, RATES, SAMPLINGS, NOISE)
def test_make_private(changes, message):
    given = dict(changes)
    made = PrivacyEngine(accountant="rdp", secure_mode=given.pop("secure_mode", False))
    refused(message, lambda: engine.build(engine=made, **given))


def test_a_gamma_that_is_not_used_is_not_refused():
    engine.step(engine.build(gamma=1e-50))


# Arguments of a wrong type

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
    "fused_step": [1, None],
    "memory_budget": ["1GB", 1.5, True, -1],
    "tile_size": [16.0, "16", True, 17],
    **{
        choice: [None, 1, ["flat"]]
        for choice in ("clipping", "clipping_function", "grad_sample_mode", "norm_algorithm",
                       "norm_reduction", "loss_reduction")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_types(name):
    for value in WRONG[name]:
        arguments = engine.arguments() | {name: value}
        if name == "max_grad_norm" and isinstance(value, list | tuple):
            arguments["clipping"] = "per_layer"
        refused(name, lambda given=arguments: PrivacyEngine().make_private(**given))


TARGET = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("target_epsilon", [0, -1, math.inf, math.nan, "1", None, True]),
        ("target_delta", [0, 1, math.nan, "1e-5", None]),
        ("epochs", [0, -1, 1.5, "3", None, True]),
        ("data_loader", [None, engine.data()]),
        ("noise_multiplier", [1.0]),
    ],
)
def test_make_private_with_epsilon(name, values):
    for value in values:
        given = engine.arguments() | TARGET
        del given["noise_multiplier"]
        made = PrivacyEngine()
        refused(name, lambda g=given | {name: value}, e=made: e.make_private_with_epsilon(**g))


@rows([
    (CORRELATED, "no account of correlated noise|CorrelatedNoise"),
    ({"sampling": "cyclic", "alphas": [2.0]}, 'alphas are for accountant "rdp"'),
    ({"noise_mechanism": "mine"}, r"call make_private\(noise_multiplier=\.\., noise_mech"),
    ({"epochs": None}, "epochs is missing: give epochs=, or steps="),
])  # fmt: skip
def test_targets(changes, message):
    given = engine.arguments() | TARGET | changes
    del given["noise_multiplier"]
    given = {name: value for name, value in given.items() if value is not None}
    given.pop("sampling", None) if changes is CORRELATED else None
    refused(message, lambda: PrivacyEngine(accountant="rdp").make_private_with_epsilon(**given))


# Other objects


@rows([
    ({"accountant": None}, "accountant"), ({"accountant": 1}, "accountant"),
    ({"accountant": "pvr"}, "accountant"), ({"hide_unprotected": "yes"}, "hide_unprotected"),
    ({"hide_unprotected": 1}, "hide_unprotected"),
    ({"checks": "never"}, "checks 'never' is unknown: choose one of first, sampled, off"),
    ({"checks": None}, "checks is None: choose one of"),
    *(({"secure_mode": wrong}, "secure_mode is .*: give True or False")
      for wrong in (1, "yes", None, np.True_)),
])  # fmt: skip
def test_engines(changes, message):
    refused(message, lambda: PrivacyEngine(**changes))


@pytest.mark.parametrize(
    ("name", "beyond"),
    [("expected_batch_size", 0), ("quantile", 1.5), ("learning_rate", 0.0),
     ("count_std", -1e-9), ("lowest", 0.0), ("lowest", 1.5), ("highest", 0.5)],
)  # fmt: skip
def test_adaptive_thresholds(name, beyond):
    for value in ("1", True, [1.0], math.nan, -1.0, beyond):
        given = {"expected_batch_size": 6, name: value}
        refused(f"^{name} is ", lambda given=given: AdaptiveThreshold(0.5, **given))
    for value in ("1", None, {1.0}, [0.5, "x"], [], 0.0, math.inf):
        refused("^max_grad_norm", lambda c=value: AdaptiveThreshold(c, expected_batch_size=6))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("data_loader", [None, [1], engine.data(), DataLoader(Stream()),
                         DataLoader(engine.data(), batch_size=None)]),
        ("max_physical_batch_size", [0, -1, 1.5, math.nan, "2", None, True]),
        ("optimizer", [None, object(), torch.optim.SGD(engine.network().parameters(), lr=1)]),
    ],
)  # fmt: skip
def test_memory_managers(name, values):
    run = engine.build()
    assert isinstance(run.optimizer, PrivateOptimizer)
    given = {"data_loader": run.loader, "max_physical_batch_size": 2, "optimizer": run.optimizer}
    for value in values:
        refused(name, lambda g=given | {name: value}: BatchMemoryManager(**g))
