"""What an audit is given: it trains copies, and leaves these as they are."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping.audit.copies import Audited


def given(**arguments) -> Audited:
    network = nn.Linear(2, 2)
    data = TensorDataset(torch.randn(12, 2), torch.zeros(12, dtype=torch.long))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.3)
    loader = DataLoader(data, batch_size=4)
    return Audited(network, optimizer, nn.CrossEntropyLoss(), loader, arguments)


def test_copies_share_nothing():
    audited = given()
    audited.module.eval()
    audited.module.weight.grad = torch.ones(2, 2)
    network, optimizer, criterion = audited.copied()
    assert network.training
    assert optimizer.param_groups[0]["params"][0] is network.weight
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert network.weight.grad is None
    assert criterion is not audited.criterion
    with torch.no_grad():
        network.weight.add_(1)
    assert not torch.equal(network.weight, audited.module.weight)
    assert audited.module.weight.grad.sum() == 4


def fail() -> None:
    torch.rand(3), np.random.rand(3), random.random()
    warnings.warn("of a copy", stacklevel=1)
    raise KeyError


def test_random_states_come_back_and_warnings_are_hidden():
    audited = given()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(KeyError), audited.untouched():
            fail()
    assert seen == []
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_units_and_rates_are_those_of_make_private():
    assert given().units() == list(range(12))
    assert given().sampled.rates == (1 / 3, 3)
    assert given(examples_per_unit=2).units() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert given(examples_per_unit=2).sampled.rates == (1 / 3, 3)
    ids = np.repeat([7, 8, 9, 5], 3)
    assert given(examples_per_unit=4, unit_ids=ids).units() == ids.tolist()
    assert given(sample_rate=0.5, steps=9).sampled.rates == (0.5, 9)
    assert given().expected_batch_size() == 4
    assert given(expected_batch_size=7.0).expected_batch_size() == 7.0


def test_keys_and_coins_are_independent_and_follow_the_users_seed():
    keys, coins = given(noise_generator=torch.Generator().manual_seed(3)).seeds()
    again, _ = given(noise_generator=torch.Generator().manual_seed(3)).seeds()
    assert keys.initial_seed() == again.initial_seed() != coins.initial_seed()
    assert given().seeds()[0].initial_seed() != given().seeds()[0].initial_seed()


def test_a_module_that_is_none():
    audited = given()
    with pytest.raises(TypeError, match="module is 3"):
        Audited(3, audited.optimizer, audited.criterion, audited.loader, {})
