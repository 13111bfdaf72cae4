"""The arguments of `make_private` in one object: checked, plain, and what is public of them."""

from fractions import Fraction

import numpy as np
from torch import nn

from dp_clipping.arguments.settings import Settings
from dp_clipping.clipping import coefficients
from dp_clipping.clipping.coefficients import GAMMA
from tests.support import engine

DEFAULTS = {
    "criterion": nn.CrossEntropyLoss(), "batch_first": True, "loss_reduction": "mean",
    "poisson_sampling": True, "clipping": "flat", "noise_generator": None,
    "grad_sample_mode": "ghost", "wrap_model": True, "rand_on_empty": False,
    "clipping_function": "abadi", "gamma": GAMMA, "expected_batch_size": None,
    "norm_algorithm": "auto", "memory_budget": None, "tile_size": None,
    "norm_reduction": "async", "adaptive_threshold": None, "data_parallel_group": None,
    "cuda_graph": False, "sample_rate": None, "steps": None, "examples_per_unit": 1, "views": 1,
    "noise_mechanism": "gaussian",
    "unit_ids": None, "sampling": "poisson", "max_batch_size": None,
}  # fmt: skip


def settings(**changes):
    return Settings(**(DEFAULTS | engine.arguments() | changes))


def test_numbers_become_pythons_own():
    given = settings(
        noise_multiplier=np.float32(2),
        max_grad_norm=Fraction(1, 2),
        expected_batch_size=np.int64(3),
    )
    numbers = (given.noise_multiplier, given.max_grad_norm, given.expected_batch_size)
    assert numbers == (2.0, 0.5, 3.0)
    assert {type(x) for x in numbers} == {float}


def test_a_registered_function_is_public_by_what_it_computes(monkeypatch):
    monkeypatch.setattr(coefficients, "_REGISTERED", {})
    coefficients.register_clipping_function("mine", lambda norms, limit: limit / norms)
    name = settings(clipping_function="mine").public()["clipping_function"]
    assert name == coefficients.described("mine") != "mine"


def test_ranks_compare_what_a_checkpoint_holds_and_more():
    given = settings().with_batch_size(world_size=1)
    public, compared = given.public(), given.compared()
    assert public.items() <= compared.items()
    assert public["num_samples"] == engine.SAMPLES
    assert public["sample_rate"] == engine.BATCH / engine.SAMPLES
    assert compared["noise_generator is given"] is False
    assert "noise_generator" not in compared
