"""Proofs of which rows of an embedding's gradient are not zero, without ranks."""

import gc

import pytest
import torch
from torch import nn

from ddp.internals.lookups import Lookups


class Pair:
    """An embedding, and what is known of its gradient; `forward` is an observed one."""

    def __init__(self, **options):
        self.table = nn.Embedding(6, 2, **options)
        self.lookups = Lookups(self.table.weight)

    def forward(self, *ids: int) -> torch.Tensor:
        hook = self.table.register_forward_hook(self.lookups.observe, with_kwargs=True)
        try:
            return self.table(torch.tensor(ids)).square().sum()
        finally:
            hook.remove()

    def promised(self) -> list[int] | None:
        mask = self.lookups.promise()
        return None if mask is None else mask.nonzero().flatten().tolist()

    def backward(self, loss: torch.Tensor, **options) -> None:
        loss.backward(**options)
        self.lookups.accumulated()


def test_one_lookup_is_promised_and_kept():
    pair = Pair()
    loss = pair.forward(4, 1, 4)
    assert pair.promised() == [1, 4]
    pair.backward(loss)
    assert pair.lookups.settle()
    assert not pair.lookups.settle(), "then it holds what other ranks have sent"
    pair.table.weight.grad = None
    assert pair.promised() is None


def test_what_is_accumulated_is_promised_with_what_follows():
    pair = Pair()
    pair.backward(pair.forward(1))
    pair.backward(pair.forward(5))
    assert pair.promised() == [1, 5]
    loss = pair.forward(0)
    assert pair.promised() == [0, 1, 5]
    pair.backward(loss)
    assert pair.lookups.settle()


def test_what_comes_behind_a_promise_breaks_it():
    pair = Pair()
    loss = pair.forward(1)
    assert pair.promised() == [1]
    pair.backward(loss)
    pair.backward(pair.forward(2))
    assert not pair.lookups.settle()


@pytest.mark.parametrize("early", [True, False])
def test_a_further_use_is_seen(early):
    pair = Pair()
    weight = pair.table.weight
    other = weight.square().sum()
    loss = other + pair.forward(1) if early else pair.forward(1) + other
    assert pair.promised() == [1]
    pair.backward(loss)
    assert not pair.lookups.settle()


def test_a_gradient_alone_from_elsewhere_is_seen():
    pair = Pair()
    pair.backward(pair.table.weight.sum())
    assert not pair.lookups.settle()
    assert pair.promised() is None


def test_writing_to_the_gradient_is_seen():
    pair = Pair()
    pair.backward(pair.forward(1))
    pair.table.weight.grad.add_(1)
    assert pair.promised() is None
    assert not pair.lookups.settle()


def test_another_gradient_in_the_same_memory_is_seen():
    """Allocators hand out what has just been freed."""
    pair = Pair()
    pair.backward(pair.forward(1))
    address = pair.table.weight.grad.data_ptr()
    for _ in range(50):
        pair.table.weight.grad = None
        pair.table.weight.grad = torch.ones(6, 2)
        if pair.table.weight.grad.data_ptr() == address:
            break
    assert pair.promised() is None


def test_several_lookups_are_not_promised():
    pair = Pair()
    first, second = pair.forward(1), pair.forward(2)
    assert pair.promised() is None
    del first
    assert pair.promised() == [2]
    pair.backward(second)
    assert pair.lookups.settle()


def test_a_graph_that_was_not_kept_cannot_run_again():
    pair = Pair()
    loss = pair.forward(1)
    pair.backward(loss)
    pair.table.weight.grad = None
    following = pair.forward(2)
    assert pair.promised() == [2], "though `loss` is alive"
    pair.backward(following, retain_graph=True)
    pair.table.weight.grad = None
    assert pair.promised() == [2]
    again = pair.forward(3)
    assert pair.promised() is None
    del again


def test_gradients_that_are_not_accumulated():
    """`torch.autograd.grad` runs the look-up, and the next backward is not its."""
    pair = Pair()
    torch.autograd.grad(pair.forward(1), pair.table.weight)
    loss = pair.forward(2)
    assert pair.promised() is None
    pair.backward(loss)
    assert pair.promised() is None
    pair.table.weight.grad = None
    loss = pair.forward(3)
    assert pair.promised() == [3]


def test_it_holds_nothing():
    pair = Pair()
    loss = pair.forward(1)
    state = pair.lookups._pending[0]
    del loss
    assert state() is None
    pair.table.weight.register_hook(lambda g: g)
    del pair.lookups
    gc.collect()
    pair.table(torch.tensor([1])).sum().backward()  # its hook on the node does nothing
