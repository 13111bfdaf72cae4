"""A mean or a sum over the batch becomes one loss a sample: what the function gives it alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dp_clipping.losses.in_network import FUNCTIONS, PerSampleReductions

B, T, V = 3, 4, 5


def arguments(function) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets whose dimension 0 has B samples."""
    torch.manual_seed(1)
    if function is F.cross_entropy or function is F.nll_loss:
        target = torch.randint(V, (B, T))
        target[0, 1:], target[1, :2] = -100, -100
        return torch.randn(B, V, T).log_softmax(1), target
    return torch.rand(B, T), torch.rand(B, T).round()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_each_sample_has_the_loss_that_it_has_alone(function, reduction):
    x, y = arguments(function)
    alone = [function(x[i : i + 1], y[i : i + 1], reduction=reduction) for i in range(B)]
    with PerSampleReductions(lambda: B) as mode:
        found = function(x, y, reduction=reduction)
    torch.testing.assert_close(found, torch.stack(alone))
    assert mode.count == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_has_the_loss_that_a_sample_has_alone(reduction):
    """Its mean is over a sample's targets, which are joined here, as Hugging Face's models do."""
    lengths, sizes = torch.tensor([6, 5, 6]), torch.tensor([1, 3, 2])
    x, targets = torch.randn(6, B, V).log_softmax(-1), torch.randint(1, V, (6,))
    rows = targets.split(sizes.tolist())
    alone = [
        F.ctc_loss(
            x[:, i : i + 1], rows[i], lengths[i : i + 1], sizes[i : i + 1], reduction=reduction
        )
        for i in range(B)
    ]
    with PerSampleReductions(lambda: B) as mode:
        found = F.ctc_loss(x, targets, lengths, sizes, reduction=reduction)
    torch.testing.assert_close(found, torch.stack(alone))
    assert mode.count == 1


def test_flattened_tokens_and_class_weights():
    x, y = arguments(F.cross_entropy)
    weight = torch.rand(V)
    loss = nn.CrossEntropyLoss(weight=weight)
    alone = [loss(x[i : i + 1], y[i : i + 1]) for i in range(B)]
    with PerSampleReductions(lambda: B):
        found = loss(x.movedim(1, 2).reshape(-1, V), y.view(-1))
    torch.testing.assert_close(found, torch.stack(alone))


def test_a_sample_without_targets_has_loss_and_gradient_zero():
    x = torch.randn(2, V, requires_grad=True)
    with PerSampleReductions(lambda: 2):
        losses = F.cross_entropy(x, torch.tensor([-100, 1]))
    losses.sum().backward()
    assert losses[0] == 0
    assert (x.grad[0] == 0).all()
    assert (x.grad[1] != 0).any()


def test_what_is_not_of_the_samples_is_left_alone():
    x, y = torch.rand(B * T), torch.rand(B * T)
    with PerSampleReductions(lambda: B + 2) as mode:
        assert F.mse_loss(x, y).shape == ()
        assert F.mse_loss(x, y, reduction="none").shape == x.shape
    assert mode.count == 0
