"""What every step asks of all modules."""

from torch import nn

from dp_clipping.torch_compat import every_module


def test_each_module_once():
    shared = nn.Linear(2, 2)
    network = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()))
    network.register_module("nothing", None)
    found = every_module(network)
    assert len(found) == len(set(found)) == 4
    assert set(found) == set(network.modules())
