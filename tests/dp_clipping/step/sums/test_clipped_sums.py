"""Clipped sums on kernels: which layers share a launch."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn

from dp_clipping.step.sums import clipped_sums
from tests.dp_clipping.conftest import assert_step, count_calls, unchecked
from tests.support import zoo


def check_one_token(most: int, expected: tuple[int, int]) -> None:
    """Layers of one token share a launch, or large ones have a product over the batch each."""
    network = zoo.seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)))
    batch = torch.randn(3, 5), torch.randn(3, 4)
    launch, product = (
        count_calls(clipped_sums.weighted_products),
        count_calls(clipped_sums.sum_of_one_token),
    )
    with (
        patch.object(clipped_sums, "MOST_SHARED", most),
        patch.object(clipped_sums, "weighted_products", launch),
        patch.object(clipped_sums, "sum_of_one_token", product),
    ):
        model = unchecked(copy.deepcopy(network), "flash_bookkeeping")
        assert_step(model, network, batch, tolerance=1e-4)
    assert (launch.count, product.count) == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(3 * 30, (1, 0)), (3 * 30 - 1, (1, 1)), (0, (0, 2))]
)
def test_small_products_of_one_token_share_a_launch(interpreter, most, expected):
    interpreter.run(check_one_token, most, expected)
