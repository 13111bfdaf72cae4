"""Tokens of packed sequences: to their places and back, in the order of the batch."""

import pytest
import torch
from torch.nn.utils import rnn

from dp_clipping.layers.recurrent.packing import Packing

LENGTHS = {"unsorted": [3, 5, 1, 5], "one": [2], "of one token": [1, 1, 1]}


@pytest.mark.parametrize("name", LENGTHS)
def test_padding_is_pytorchs(name):
    lengths = torch.tensor(LENGTHS[name])
    x = torch.randn(int(lengths.max()), len(lengths), 2)
    packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    packing = Packing.of(packed)
    expected, _ = rnn.pad_packed_sequence(packed)
    padded = packing.pad(packed.data)
    assert torch.equal(padded, expected)
    assert torch.equal(packing.pack(padded), packed.data)
    assert packing.ends.tolist() == [n - 1 for n in lengths.tolist()]
    assert torch.equal(packing.running().sum(0)[:, 0], lengths)
    states = torch.randn(2, len(lengths), 3)
    assert torch.equal(packing.by_batch(packing.by_length(states)), states)
    by_length = lengths.index_select(0, packed.sorted_indices)
    assert torch.equal(packing.by_length(lengths[None, :, None])[0, :, 0], by_length)


def test_sequences_that_are_sorted_already():
    packed = rnn.pack_sequence([torch.ones(3, 1), 2 * torch.ones(2, 1)])
    packing = Packing.of(packed)
    assert packing.order is None
    assert packing.pad(packed.data)[..., 0].tolist() == [[1, 2], [1, 2], [1, 0]]
    states = torch.randn(1, 2, 3)
    assert packing.by_length(states) is packing.by_batch(states) is states


def test_gradients_go_the_other_way():
    packed = rnn.pack_sequence([torch.randn(n, 2) for n in (2, 4, 1)], enforce_sorted=False)
    packing = Packing.of(packed)
    data = packed.data.double().requires_grad_()
    assert torch.autograd.gradcheck(packing.pad, data)
    padded = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packing.pack, padded)
