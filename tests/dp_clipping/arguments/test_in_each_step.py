"""σ, C and the divisor: any kind of number, in float32's range, in each step too."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support import engine


def refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("number", [1, np.float32(1.0), np.float64(1.0), np.int64(1), Fraction(1)])
def test_numbers_of_every_kind_are_taken(number):
    run = engine.build(noise_multiplier=number, max_grad_norm=number, expected_batch_size=number)
    engine.step(run)


@pytest.mark.parametrize(
    "wrong",
    [{"noise_multiplier": 1e39}, {"noise_multiplier": 1e30, "max_grad_norm": 1e30},
     {"noise_multiplier": 1e-30, "max_grad_norm": 1e-9}],
)  # fmt: skip
def test_noise_set_beyond_float32_is_refused(wrong):
    run = engine.build()
    engine.step(run)
    for name, value in wrong.items():
        setattr(run.optimizer, name, value)
    refused("is beyond float32", lambda: engine.step(run))
    run.optimizer.noise_multiplier = 0.0  # no noise overflows nothing
    engine.step(run)


@pytest.mark.parametrize("name", ["expected_batch_size", "loss_reduction"])
@pytest.mark.parametrize("value", [0, math.nan, "men", None])
def test_the_divisor_is_checked_in_each_step(name, value):
    run = engine.build()
    setattr(run.optimizer, name, value)
    before = engine.parameters(run)
    refused(name, lambda: engine.step(run))
    assert all(map(torch.equal, before, engine.parameters(run)))
    assert run.engine.accountant.history == []
