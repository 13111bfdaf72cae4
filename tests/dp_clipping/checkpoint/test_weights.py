"""Checkpoints without weights that another file has."""

import pytest
import torch
from torch import nn

from dp_clipping.checkpoint.file_format import MODULE
from dp_clipping.checkpoint.weights import digest_of
from tests.support.saved_runs import build, load, save, state, train, trained

pytestmark = pytest.mark.filterwarnings("error")


def network_of(run) -> nn.Module:
    return run.model.network


@pytest.mark.parametrize("weights", ["none", "trainable"])
def test_it_goes_on_bit_for_bit(path, weights):
    whole = trained(2, frozen=True)
    save(whole, path, weights=weights)
    elsewhere = {name: x.clone() for name, x in network_of(whole).state_dict().items()}
    expected = train(whole, 3)
    resumed = build(frozen=True, seed=9)
    network_of(resumed).load_state_dict(elsewhere)
    load(resumed, path)
    assert train(resumed, 3) == expected
    assert state(resumed) == state(whole)


def test_what_is_written(path):
    run = trained(1, frozen=True)
    trainable = {n for n, p in network_of(run).named_parameters() if p.requires_grad}
    every = set(network_of(run).state_dict())
    assert trainable < every
    for weights, names in (("all", every), ("trainable", trainable), ("none", set())):
        save(run, path, weights=weights)
        assert set(torch.load(path, weights_only=True)[MODULE]) == names


@pytest.mark.parametrize("weights", ["none", "trainable"])
def test_other_weights_are_refused(path, weights):
    """The same noise on another sum would give away the difference of the two."""
    whole = trained(1, frozen=True)
    save(whole, path, weights=weights)
    resumed = build(frozen=True)
    network_of(resumed).load_state_dict(network_of(whole).state_dict())
    frozen = next(p for p in network_of(resumed).parameters() if not p.requires_grad)
    with torch.no_grad():
        frozen.view(-1)[0] += 1e-3
    before = state(resumed)
    with pytest.raises(ValueError, match=r"other ones than it had.*model\.load_state_dict"):
        load(resumed, path)
    assert state(resumed) == before


def test_an_unknown_kind_is_refused(path):
    with pytest.raises(ValueError, match="choose one of all, trainable, none"):
        save(build(), path, weights="some")


def test_a_digest_tells_names_types_shapes_and_values():
    x = torch.arange(4.0)
    given = [{"a": x}, {"b": x}, {"a": x.double()}, {"a": x.view(2, 2)}, {"a": x + 1}, {}]
    given += [{"a": x.bfloat16()}, {"a": torch.tensor(0.0)}, {"a": torch.empty(0)}]
    assert len({digest_of(one) for one in given}) == len(given)
    assert digest_of({"a": x, "b": x}) == digest_of({"b": x, "a": x.clone()})
