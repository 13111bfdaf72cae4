"""Canaries: examples whose gradient is one coordinate of their own."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.audit.canaries import CanaryNetwork, Proxy
from dp_clipping.verification.user_loss import loss_of

DATA = TensorDataset(torch.arange(6.0)[:, None], torch.zeros(6, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_are_at_least_float32(dtype):
    table = CanaryNetwork(nn.Linear(1, 2).to(dtype), 3).table
    assert table.weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def private():
    network = CanaryNetwork(nn.Linear(1, 2), 3)
    return PrivacyEngine().make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=3), noise_multiplier=0.0, max_grad_norm=1.0,
        grad_sample_mode="bookkeeping",
    )  # fmt: skip


def test_the_users_loss_sees_the_users_network():
    model, _, criterion, _ = private()
    x, y = DATA[:2]
    proxy = Proxy(model, torch.tensor([1, 3]))
    assert proxy.weight is model.network.network.weight
    loss_of(None, proxy, criterion, (x, y)).backward()
    assert proxy.values.shape == (2,)
    assert model.network.network.weight.grad.any()


def test_what_a_loss_must_return():
    model, _, criterion, _ = private()
    proxy = Proxy(model, torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="no pair of inputs and targets but a dict"):
        loss_of(None, proxy, criterion, {"x": DATA[:2][0]})
    with pytest.raises(TypeError, match="loss returned Tensor"):
        loss_of(lambda model, criterion, batch: model(batch[0]).sum(), proxy, criterion, DATA[:2])
