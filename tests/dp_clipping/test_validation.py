"""What cannot be private, refused by name, with what to use instead."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from dp_clipping.validation import check_module, problem_of, refuse_offsets, replicas


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False).eval()


REFUSED = {
    "batch norm": (lambda: nn.BatchNorm1d(2), "use nn.GroupNorm"),
    "batch norm in evaluation": (lambda: nn.BatchNorm1d(2).eval(), "use nn.GroupNorm"),
    "no running statistics": (
        lambda: frozen(nn.BatchNorm1d(2, track_running_stats=False)),
        "use nn.GroupNorm",
    ),
    "instance norm": (
        lambda: nn.InstanceNorm1d(2, track_running_stats=True),
        "track_running_stats",
    ),
    "sparse": (lambda: nn.Embedding(3, 2, sparse=True), "sparse=False"),
    "max_norm": (lambda: frozen(nn.Embedding(3, 2, max_norm=1.0)), "max_norm=None"),
    "by frequency": (lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "lazy": (lambda: nn.LazyLinear(2), "run the network once"),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), "real and imaginary parts"),
    "parametrized lstm": (
        lambda: parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"),
        "without parametrizations",
    ),
    "parametrized lstm cell": (
        lambda: parametrizations.weight_norm(nn.LSTMCell(2, 2), "weight_hh"),
        "without parametrizations",
    ),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5), "prune.remove"),
    "spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(2, 2)), "remove_spectral_norm"),
    "replicas": (lambda: nn.DataParallel(nn.Linear(2, 2)), "ddp.wrap"),
}
TAKEN = {
    "fixed batch norm": lambda: frozen(nn.BatchNorm1d(2)),
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


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, instead = REFUSED[name]
    module = make()
    assert instead in " ".join(problem_of(module))
    network = nn.Sequential(nn.Linear(2, 2), module)
    with pytest.raises(ValueError, match=rf"\b1 \({type(module).__name__}\)"):
        check_module(network)


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


def test_wrappers_that_know_no_clipped_sums():
    assert nn.DataParallel in replicas()
    assert nn.parallel.DistributedDataParallel in replicas()
