"""One ordinary backward per sample: norms, sums, and samples that are random."""

import pytest
import torch
from torch import nn

from dp_clipping.capture.samples.bags import Bags
from dp_clipping.verification.one_by_one import Setting, one_by_one


def setting_of(network: nn.Module, x: torch.Tensor, function: str = "abadi", **changes) -> Setting:
    weight, bias = network.weight, network.bias
    values = {
        "losses_of": lambda batch: network(batch).square().sum(1),
        "batch": x,
        "size": len(x),
        "batch_first": True,
        "groups": {weight: 0, bias: 1},
        "clip_norms": torch.tensor([0.5, 2.0], dtype=torch.float64),
        "function": function,
        "gamma": 0.25,
    }
    return Setting(**values | changes)


@pytest.mark.parametrize("function", ["abadi", "automatic"])
def test_by_hand(function):
    """Gradients of (wx + b)²: 2(wx + b)x and 2(wx + b)."""
    network = nn.Linear(1, 1).double()
    nn.init.constant_(network.weight, 2.0)
    nn.init.constant_(network.bias, 1.0)
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = one_by_one(setting_of(network, x, function))
    weights, biases = torch.tensor([6.0, 2.0]).double(), torch.tensor([6.0, -2.0]).double()
    torch.testing.assert_close(found.norms, torch.stack([weights.abs(), biases.abs()]))
    if function == "abadi":
        c = [0.5 / weights.abs(), (2 / biases.abs()).clamp(max=1)]
    else:
        c = [0.5 / (weights.abs() + 0.25), 2 / (biases.abs() + 0.25)]
    for parameter, coefficients, g in zip(network.parameters(), c, (weights, biases), strict=True):
        total = found.sums[parameter]
        torch.testing.assert_close(total.flatten(), (coefficients * g).sum()[None])


def test_a_sample_is_picked_where_the_batch_is():
    network, x = nn.Linear(2, 2), torch.arange(6.0).view(3, 2)
    setting = setting_of(network, {"x": x, "shared": torch.ones(2)}, size=3)
    assert torch.equal(setting.sample(1)["x"], x[1:2])
    assert torch.equal(setting.sample(1)["shared"], torch.ones(2))
    turned = setting_of(network, x.t(), batch_first=False, size=3)
    assert torch.equal(turned.sample(2), x.t()[:, 2:])


@pytest.mark.parametrize("last", [False, True])
def test_a_sample_of_bags_is_a_slice(last):
    offsets = torch.tensor([0, 2, 2, 5][: 3 + last])
    batch = {"label": torch.arange(3), "ids": torch.arange(5), "offsets": offsets}
    bags = (Bags(1, 2, has_last=last),)
    setting = setting_of(nn.Linear(1, 1), torch.ones(3), batch=batch, size=3, bags=bags)
    for number, ids in enumerate(([0, 1], [], [2, 3, 4])):
        found = setting.sample(number)
        assert found["label"].tolist() == [number]
        assert found["ids"].tolist() == ids
        assert found["offsets"].tolist() == [0, len(ids)][: 1 + last]
