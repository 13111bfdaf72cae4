"""What can be private; what cannot has its rows in `misuse/test_refusals.py`."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dp_clipping.capture.samples.bags import refuse_offsets
from dp_clipping.validation import check_module, problem_of


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False).eval()


TAKEN = {
    "fixed batch norm": lambda: frozen(nn.BatchNorm1d(2)),
    "batch norm in evaluation": lambda: nn.BatchNorm1d(2).eval(),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "instance norm": lambda: nn.InstanceNorm1d(2),
    "lstm": lambda: nn.LSTM(2, 2),
    "lstm cell": lambda: nn.LSTMCell(2, 2),
    "frozen lstm cell": lambda: frozen(
        parametrizations.weight_norm(nn.LSTMCell(2, 2), "weight_hh")
    ),
    "frozen and sparse": lambda: frozen(nn.Embedding(3, 2, sparse=True)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    module = TAKEN[name]()
    assert problem_of(module) is None
    check_module(nn.Sequential(nn.Linear(2, 2), module))


def test_all_are_named_at_once():
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"(?s)0 \(BatchNorm1d\).*2 \(LazyLinear\)"):
        check_module(network)


def test_offsets_of_bags_are_refused_in_sharded_networks():
    bag, ids = nn.EmbeddingBag(3, 2), torch.tensor([0, 1])
    for args, kwargs in (((ids,), {}), ((), {"input": ids})):
        with pytest.raises(ValueError, match="EmbeddingBag is called with offsets"):
            refuse_offsets(bag, args, kwargs)
    refuse_offsets(bag, (ids[None],), {})
