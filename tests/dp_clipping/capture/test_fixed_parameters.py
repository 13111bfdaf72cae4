"""Parameters that are frozen, replaced or converted after `make_private` are refused."""

import pytest
import torch
from torch import nn

from dp_clipping.capture.fixed_parameters import FixedParameters
from tests.dp_clipping.conftest import private


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


@pytest.fixture
def parameters(network):
    return FixedParameters(private(network).capture)


def test_what_is_as_it_was_is_accepted(parameters, network):
    network[0].weight.data = torch.ones(2, 3)
    parameters.check()


def test_parameters_that_were_frozen_or_replaced_are_refused(parameters, network):
    network[1].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"1\.bias \(frozen now\)"):
        parameters.check()
    network[1].bias.requires_grad_(True)
    network[1].bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"1\.bias of the network is another tensor"):
        parameters.check()


def test_parameters_of_another_dtype_are_refused(parameters, network):
    network.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"was torch\.float32 at make_private and is torch\.bf"):
        parameters.check()


def test_a_module_that_is_gone_is_refused(parameters, network):
    del network[1]
    with pytest.raises(RuntimeError, match=r"1\.bias, 1\.weight of the network is another tensor"):
        parameters.check()
