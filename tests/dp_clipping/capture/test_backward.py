"""A backward that failed keeps nothing alive."""

import weakref

import pytest
import torch

from dp_clipping.capture.backward import flush_ready_nodes


class Held(torch.autograd.Function):
    """Keeps an activation, which is watched."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.ones(3)
        HELD.append(weakref.ref(ctx.kept))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Fails(torch.autograd.Function):
    """A node that another one is queued behind."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError


HELD: list[weakref.ref] = []


def fail() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ArithmeticError):
        (Held.apply(x) + Fails.apply(x)).sum().backward()


def test_activations_of_a_failed_backward_go():
    HELD.clear()
    with torch.autograd.set_multithreading_enabled(False):
        fail()
        with torch.no_grad():
            flush_ready_nodes()
    assert HELD
    assert not any(held() is not None for held in HELD)
