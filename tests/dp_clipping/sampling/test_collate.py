"""What a batch without samples looks like."""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding

from dp_clipping.sampling.collate import CollateWithEmpty, PaddedCollate
from dp_clipping.sampling.collate_check import CheckedCollate

Pair = namedtuple("Pair", ["x", "y"])


class Frozen(Mapping):
    """A mapping that cannot be changed."""

    def __init__(self, entries):
        self._entries = dict(entries)

    def __getitem__(self, key):
        return self._entries[key]

    def __iter__(self):
        return iter(self._entries)

    def __len__(self):
        return len(self._entries)


def empty_of(collate_fn, sample, batch_dim=0, dummy=False):
    return CollateWithEmpty(collate_fn, sample, batch_dim=batch_dim, dummy=dummy)([])


def test_tensors_and_arrays_have_no_rows():
    x, label, array = empty_of(default_collate, (torch.ones(3), 1, np.ones(2, dtype=np.float64)))
    assert (x.shape, x.dtype) == ((0, 3), torch.float32)
    assert (label.shape, label.dtype) == ((0,), torch.int64)
    assert array.shape == (0, 2)
    assert array.dtype == torch.float64


def test_the_batch_may_be_the_second_dimension():
    def time_major(samples):
        return torch.stack([x for x, _ in samples], dim=1), torch.tensor([y for _, y in samples])

    x, labels = empty_of(time_major, (torch.ones(5, 3), 1), batch_dim=1)
    assert x.shape == (5, 0, 3)
    assert labels.shape == (0,)


def test_it_is_the_dimension_that_grows():
    """A loop may transpose what a loader makes for `batch_first=False`, and labels may not be."""
    sample = torch.ones(5, 3), torch.ones(5)
    x, labels = empty_of(default_collate, sample, batch_dim=1)
    assert (x.shape, labels.shape) == ((0, 5, 3), (0, 5))
    x, labels = padded(default_collate, [sample], batch_dim=1)([sample])
    assert (x.shape, labels.shape) == ((4, 5, 3), (4, 5))


def test_what_is_the_same_for_all_samples_keeps_its_shape():
    def masked(samples):
        return torch.stack(samples), torch.ones(3, 3), np.ones((1, 3))

    x, mask, positions = empty_of(masked, torch.ones(3))
    assert (x.shape, mask.shape, positions.shape) == ((0, 3), (3, 3), (1, 3))
    assert not mask.any()
    assert not positions.any()
    for sample in (torch.ones(2), torch.ones(3)):
        squeeze = lambda rows: torch.stack(rows).squeeze()  # noqa: E731
        assert empty_of(squeeze, sample).shape == (0,)
        with pytest.raises(ValueError, match="adds copies where each sample has one row"):
            padded(squeeze, [sample])([sample])


def test_a_list_of_samples_is_empty_and_structure_stays():
    def lists(samples):
        return {"names": [n for n, _ in samples], "pair": Pair(torch.ones(len(samples), 2), "mean"),
                "frozen": Frozen({"k": 3})}  # fmt: skip

    found = empty_of(lists, ("a", 1))
    assert found["names"] == []
    assert isinstance(found["pair"], Pair)
    assert found["pair"].x.shape == (0, 2)
    assert found["pair"].y == "mean"
    assert isinstance(found["frozen"], Frozen)


@dataclass(frozen=True)
class Graph:
    x: torch.Tensor
    names: list


def test_a_dataclass_is_empty_and_is_filled_up():
    def joined(samples):
        return Graph(torch.stack([x for x, _ in samples]), [name for _, name in samples])

    samples = [(torch.ones(2), "a"), (torch.ones(2), "b")]
    found = empty_of(joined, samples[0])
    assert (type(found), found.x.shape, found.names) == (Graph, (0, 2), [])
    found = padded(joined, samples)(samples)
    assert found.x.sum(1).tolist() == [2, 2, 2, 2]
    assert found.names == ["a", "b", "a", "a"]


def test_nothing_of_the_sample_is_in_it():
    sample = torch.full((3,), 7.0)
    found = empty_of(default_collate, sample)
    assert found.untyped_storage().nbytes() == 0
    dummy = empty_of(default_collate, sample, dummy=True)
    assert dummy.shape == (1, 3)
    assert set(dummy.flatten().tolist()) <= {0.0, 1.0}


def test_a_batch_that_a_user_changes_is_not_the_next_one():
    collate = CollateWithEmpty(lambda s: {"x": torch.ones(len(s), 2)}, 0, batch_dim=0, dummy=False)
    collate([])["x"] = None
    assert collate([])["x"].shape == (0, 2)


def test_the_sample_is_not_changed_by_the_collate_function():
    def greedy(samples):
        return torch.stack([s.pop() for s in samples])

    sample = [torch.ones(2)]
    empty_of(greedy, sample)
    assert len(sample) == 1


def test_what_might_carry_the_sample_is_refused():
    with pytest.raises(ValueError, match="collate_fn makes a object, and what no samples look"):
        empty_of(lambda samples: object(), 1)


def holding_itself(samples):
    batch = default_collate(samples)
    batch["parent"] = [batch]
    return batch


def test_a_batch_that_holds_itself_is_refused():
    sample = {"x": torch.ones(2)}
    with pytest.raises(
        ValueError, match=r"collate_fn makes a batch that holds itself.*return node\.x"
    ):
        empty_of(CheckedCollate(holding_itself, batch_dim=0, in_order=False), sample)


def padded(collate_fn, samples, rows=4, batch_dim=0):
    return PaddedCollate(collate_fn, samples[0], batch_dim=batch_dim, rows=rows)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_copies_follow_the_samples(count):
    samples = [(torch.full((3,), 1.0 + i), i + 1, np.full(2, i + 1.0)) for i in range(4)]
    x, label, array = padded(default_collate, samples)(samples[:count])
    whole = default_collate(samples)
    for found, expected in zip((x, label, array), whole, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found[:count], expected[:count])
        assert torch.equal(found[count:], expected[:1].expand_as(found[count:]))


@pytest.mark.parametrize("count", [0, 2])
def test_structures_and_lists_of_samples_are_filled_up(count):
    def lists(samples):
        return BatchEncoding({
            "ids": torch.stack([x for _, x in samples]), "names": [n for n, _ in samples],
            "pair": Pair(np.ones((len(samples), 2)), "mean"), "position": torch.arange(3)[None],
            "frozen": Frozen({"k": 3, "none": None}),
        })  # fmt: skip

    samples = [("a", torch.ones(3)), ("b", torch.ones(3))]
    found = padded(lists, samples)(samples[:count])
    assert isinstance(found, BatchEncoding)
    assert found.to("cpu")["ids"].tolist() == [[1.0] * 3] * 4
    assert found["names"] == ["a", "b"][:count] + ["a"] * (4 - count)
    assert found["pair"].x.shape == (4, 2)
    assert found["pair"].y == "mean"
    assert found["position"].shape == (1, 3)
    assert dict(found["frozen"]) == {"k": 3, "none": None}


def test_the_samples_may_be_in_the_second_dimension():
    def time_major(samples):
        return torch.stack([x for x, _ in samples], dim=1), torch.tensor([y for _, y in samples])

    samples = [(torch.ones(5, 3), 1), (torch.full((5, 3), 2.0), 2)]
    x, labels = padded(time_major, samples, batch_dim=1)(samples)
    assert x.shape == (5, 4, 3)
    assert x.sum((0, 2)).tolist() == [15.0, 30.0, 15.0, 15.0]
    assert labels.tolist() == [1, 2, 1, 1]


def test_rows_that_are_no_samples_are_refused():
    def joined(samples):
        return torch.cat(samples)

    with pytest.raises(ValueError, match=r"shape \(5,\) of 1 samples.*pad_batches=False"):
        padded(joined, [torch.ones(5)])


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_packed_sequences(batch_dim):
    def packs(samples):
        return pack_sequence(samples, enforce_sorted=False)

    empty = empty_of(packs, torch.ones(2, 3), batch_dim)
    assert isinstance(empty, PackedSequence)
    assert (empty.data.shape, empty.batch_sizes.shape) == ((0, 3), (0,))
    dummy = empty_of(packs, torch.full((2, 3), 7.0), batch_dim, dummy=True)
    assert dummy.batch_sizes.tolist() == [1, 1]
    assert dummy.data.max() <= 1
    with pytest.raises(ValueError, match="a PackedSequence of 1 samples, and pad_batches"):
        PaddedCollate(packs, torch.ones(1, 3), batch_dim=batch_dim, rows=4)
