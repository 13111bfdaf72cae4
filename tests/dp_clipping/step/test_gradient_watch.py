"""What else than private backwards changes `.grad` is noticed."""

import pytest
import torch

from tests.dp_clipping.step.test_gradient_buffer import clear, fill


def test_a_sum_that_was_changed_is_refused(buffer, network):
    fill(buffer)
    buffer.watch.refuse_unclipped()
    network[1].weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match=r"the gradient of 1\.weight was changed between"):
        buffer.watch.refuse_unclipped()


def test_an_ordinary_gradient_is_refused(buffer, network):
    fill(buffer)
    network[1](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has added to the gradient of 1\.bias, 1\.weight"):
        buffer.watch.refuse_unclipped()
    clear(buffer)
    fill(buffer)
    buffer.watch.refuse_unclipped()


def test_what_the_optimizer_applies_may_be_changed(buffer, network):
    fill(buffer)
    buffer.watch.settle()
    network[1].weight.grad.mul_(2)
    buffer.watch.refuse_unclipped()


def test_nothing_is_noticed_once_it_is_removed(buffer, network):
    fill(buffer)
    buffer.watch.remove()
    network[0](torch.ones(1, 3, dtype=torch.bfloat16))
    assert not any(p._post_accumulate_grad_hooks for p in network.parameters())
