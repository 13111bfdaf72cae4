"""Norms in plain PyTorch: of gradients or of factors, in few calls and few backwards."""

import copy

import pytest
import torch
from torch import nn

from dp_clipping.step.sums import plain
from tests.dp_clipping.conftest import (
    assert_step,
    clipped_sums,
    count_calls,
    private_loss,
    unchecked,
)
from tests.support import zoo

BATCH, WIDTH = 3, 5


@pytest.fixture
def shapes(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the per-sample gradients that norms are taken of."""
    found = []
    right = plain.squared_norms

    def noted(rows):
        found.append(tuple(rows.shape))
        return right(rows)

    monkeypatch.setattr(plain, "squared_norms", noted)
    return found


def test_vectors_of_one_shape_share_a_call(shapes):
    """Biases and scales, of which a network has hundreds."""
    layers = [layer for _ in range(4) for layer in (nn.LayerNorm(WIDTH), nn.Tanh())]
    network = nn.Sequential(*layers)
    model = unchecked(network)
    x = torch.randn(BATCH, 2, WIDTH)
    private_loss(model, (x, torch.randn(BATCH, 2, WIDTH)), zoo.product).backward()
    assert shapes == [(8 * BATCH, WIDTH)]


def scaled() -> nn.Module:
    """Multiplies with two numbers."""
    return zoo.Net(
        lambda net, x: net.first * x + net.second * x.square(),
        first=nn.Parameter(torch.tensor(2.0)), second=nn.Parameter(torch.tensor(3.0)),
    )  # fmt: skip


def test_numbers_share_a_call(shapes):
    model = unchecked(scaled(), max_grad_norm=1e9)
    x, target = torch.randn(2, BATCH, WIDTH)
    found = clipped_sums(model, (x, target))
    assert shapes == [(2 * BATCH,)]
    gradients = torch.stack([(x * target).sum(1), (x.square() * target).sum(1)])
    torch.testing.assert_close(model.per_sample_gradient_norms, gradients.norm(dim=0))
    torch.testing.assert_close(torch.stack([*found.values()]), gradients.sum(1))


@pytest.mark.parametrize(
    ("mode", "tokens", "is_formed"),
    [("bookkeeping", 2, False), ("bookkeeping", 3, True), ("ghost", 2, False), ("ghost", 3, False)],
)
def test_of_a_weight_the_smaller_is_kept(shapes, mode, tokens, is_formed):
    """Its gradient, 5 x 5 a sample, or its factors, 5 + 5 a token; the latter if none is kept."""
    model = unchecked(nn.Linear(WIDTH, WIDTH, bias=False), mode)
    clipped_sums(model, (torch.randn(BATCH, tokens, WIDTH), torch.randn(BATCH, tokens, WIDTH)))
    assert shapes == [(BATCH, WIDTH, WIDTH)] * is_formed


@pytest.mark.parametrize(
    ("small", "norms", "sums"),
    [
        (plain.SMALL, [(BATCH, 2 * WIDTH, WIDTH), (3 * BATCH, WIDTH, WIDTH)], 1),
        (BATCH * WIDTH * WIDTH, [(BATCH, 2 * WIDTH, WIDTH), (3 * BATCH, WIDTH, WIDTH)], 2),
        (0, [(BATCH, 2 * WIDTH, WIDTH), *[(BATCH, WIDTH, WIDTH)] * 3], 8),
    ],
)
def test_small_gradients_share_calls(monkeypatch, shapes, small, norms, sums):
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    network = nn.Sequential(*layers, nn.Linear(WIDTH, 2 * WIDTH)).double()
    batch = torch.randn(BATCH, 5, WIDTH).double(), torch.randn(BATCH, 5, 2 * WIDTH).double()
    add = count_calls(plain.weighted_sum)
    monkeypatch.setattr(plain, "weighted_sum", add)
    monkeypatch.setattr(plain, "SMALL", small)
    assert_step(unchecked(copy.deepcopy(network)), network, batch)
    assert [shape for shape in shapes if len(shape) == 3] == norms
    assert add.count == sums


def test_a_change_of_one_small_sum_names_its_parameter_alone():
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = unchecked(network)
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    private_loss(model, batch, zoo.product).backward()
    network[0].bias.grad.mul_(2)
    with pytest.raises(RuntimeError, match=r"^the gradient of 0\.bias was changed"):
        model.gradient_buffer.watch.refuse_unclipped()


def test_tokens_that_cancel_are_clipped_by_what_rounding_may_hide():
    """In 16 bit their Gram matrices may be wrong by more than the norm: here both are exact.

    With S = Σ_t |a_t||y_t| = 2 * 8 * 2^13 the norm that clips is sqrt(n^2 + 2^-16 S^2).
    """
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    x = torch.ones(1, 2, 64)
    x[0, 1, 0] += 2**-6
    target = torch.full((1, 2, 64), 2.0**10)
    target[0, 1] *= -1
    model = unchecked(layer, max_grad_norm=200.0)
    (found,) = clipped_sums(model, (x.bfloat16(), target.bfloat16())).values()
    assert model.per_sample_gradient_norms.item() == 128
    assert 0.3 * 128 < found.float().norm() < 200 / 512 * 128
