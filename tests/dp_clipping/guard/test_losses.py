"""Losses that depend on other samples than their own."""

import pytest
import torch

from dp_clipping.capture.samples.batch import Shapes
from dp_clipping.guard.losses import Watched
from dp_clipping.layers.batch_layout import Layout

ROWS = Layout("dimension", 0)


def outputs() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, generator=draw).requires_grad_()


def check(loss, layout=ROWS, number=0) -> None:
    watched = Watched(outputs(), [layout], number)
    watched.check_graph(loss(watched.outputs))


@pytest.mark.parametrize("number", [0, 1])
def test_outputs_of_one_number_a_sample(number):
    x = outputs()
    watched = Watched(x[:, 0], [ROWS], number)
    watched.check_graph(watched.outputs.square())


@pytest.mark.parametrize("number", [0, 1])
def test_outputs_of_no_numbers(number):
    """Samples without a token: nothing of them can depend on others."""
    x = torch.zeros(0, 4, 3, requires_grad=True)
    watched = Watched(x.exp(), [Layout("dimension", 1)], number)
    watched.check_graph(watched.outputs.square().sum((0, 2)))


def test_an_output_of_the_whole_batch():
    with pytest.raises(ValueError, match=r"of shape \(4, 3\) in which no dimension counts"):
        check(lambda y: y.sum() * torch.ones(4), layout=None)


def test_the_user_has_tensors_of_their_own():
    y = outputs()
    watched = Watched({"logits": y}, [ROWS], 0)
    assert watched.outputs["logits"] is not y
    assert torch.equal(watched.outputs["logits"], y)


def counts(shape, size, *earlier):
    """Whether the first dimension of a call's argument may count samples, by earlier calls."""
    shapes = Shapes()
    for of, batch in earlier:
        shapes.note(((torch.empty(of),), {}), batch)
    x = torch.empty(shape)
    return shapes.counts_samples((0, (x.dim(),), ()), 0, size)


def test_a_dimension_that_did_not_follow_the_batch_counts_no_samples():
    assert not counts((4,), 4, ((4,), 3))
    assert not counts((4, 2), 4, ((3, 2), 3), ((4, 2), 5))


def test_one_that_may_have_followed_it_does():
    assert counts((4,), 4)
    assert counts((4,), 4, ((4,), 4), ((5,), 5))
    assert counts((4,), 4, ((4,), 2))  # two tokens a sample
    assert counts((4,), 4, ((4,), 1))
    assert counts((4,), 4, ((4, 1), 3))  # another argument
