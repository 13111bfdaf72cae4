"""Networks that hand-built data parallelism often gets wrong."""

import pytest
import torch
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Branches,
    branches_loss,
    chain_loss,
    numbers,
    small_buckets,
    whole_parameters,
    wrapped,
)
from tests.support.differences import any_order
from tests.support.on_ranks import on_ranks


class MixedTypes(nn.Module):
    """float32, float64 and bfloat16 in turn, some frozen, a scalar and an empty parameter."""

    def __init__(self):
        super().__init__()
        types = [torch.float32, torch.float64, torch.bfloat16] * 2
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=t) for t in types)
        self.layers[3].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.large = nn.Parameter(torch.randn(5, 501) / 20)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        x = torch.cat([x.float(), self.empty])
        return (x @ self.large) * self.scale


def five_numbers(seed: int):
    def loss(model, rank):
        return model(numbers(4, 5, seed=seed, rank=rank, like=model)).square().sum()

    return loss


def mixed_types(context: Context, name: str) -> None:
    for reduce in ("mean", "sum"):
        torch.manual_seed(0)
        # 100 bytes: the large parameter is far larger than a bucket
        pair = Beside(context, name, MixedTypes(), reduce=reduce)
        for step in range(3):
            pair.step(five_numbers(step), set_to_none=step % 2 == 0)
        assert pair.model.module.layers[3].weight.grad is None
        for parameter in pair.model.parameters():
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype


def bucket_sizes(context: Context, name: str) -> None:
    for megabytes in (1e-6, 3e-4, 100):
        pair = Beside(context, name, **small_buckets(name, megabytes))
        for step in range(3):
            pair.step(chain_loss(step))


class Transposed(nn.Module):
    """The gradient of `x @ weight.T` in a channels-last or transposed layout."""

    def __init__(self, rank: int):
        super().__init__()
        weight = torch.randn(6, 4)
        # A layout of its own on each rank: the same numbers must meet all the same.
        self.weight = nn.Parameter(weight if rank % 2 == 0 else weight.t().contiguous().t())
        self.conv = nn.Conv2d(2, 3, 3).to(
            memory_format=torch.channels_last if rank % 2 == 0 else torch.contiguous_format
        )

    def forward(self, x):
        return self.conv((x @ self.weight).view(1, 2, 4, 4))


@on_ranks(2, "ranks")
def test_layouts_that_differ_between_ranks(context: Context, hand_built: str) -> None:
    """PyTorch's DDP refuses strides that differ."""

    def loss(model, rank):
        return model(numbers(8, 6, seed=3, rank=rank, like=model).double()).square().sum()

    pair = Beside(context, hand_built, Transposed(context.rank).double())
    for step in range(3):
        pair.step(loss, set_to_none=step % 2 == 0)


def another_order_on_each_rank(context: Context, name: str) -> None:
    """Hooks fire in another order on each rank; the gradients must not be mixed up."""
    pair = Beside(context, name, Branches(), **any_order(name))
    for step in range(4):

        def order(rank: int, step: int = step) -> list[int]:
            turn = (rank + step) % 4
            return [*range(turn, 4), *range(turn)][:: 1 if rank % 2 else -1]

        pair.step(branches_loss(step, order), set_to_none=step % 2 == 0)


@on_ranks(2, "ranks")
def test_what_the_wrapper_looks_like(context: Context, implementation: str) -> None:
    """An nn.Module: `.module` is the network, and checkpoints have the keys of PyTorch's DDP."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    names = list(module.state_dict())
    model = wrapped(context, implementation, module)
    assert isinstance(model, nn.Module)
    assert model.module is module
    assert list(model.state_dict()) == [f"module.{name}" for name in names]
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    with whole_parameters(model):
        assert torch.equal(module[0].weight, torch.ones_like(module[0].weight))
    assert [n for n, _ in model.named_parameters()] == [
        f"module.{n}" for n, _ in module.named_parameters()
    ]
    assert set(model.stats()) >= {"collectives", "bytes", "buckets"}


@pytest.mark.parametrize("body", [mixed_types, bucket_sizes, another_order_on_each_rank])
def test_networks(ranks, implementation, body):
    ranks.run(2, body, implementation)


def test_networks_on_more_ranks(ranks, implementation):
    ranks.run(min(3, ranks.size), another_order_on_each_rank, implementation)


class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens):
        return self.layer(self.table(tokens))


def sparse(context: Context, name: str) -> None:
    module = SparseEmbedding().to(context.device)
    model = wrapped(context, name, module)
    tokens = torch.arange(5, device=context.device)
    with pytest.raises(RuntimeError, match=r"table\.weight.*sparse"):
        model(tokens).sum().backward()
    with pytest.raises(RuntimeError, match=r"table\.weight"):
        model.finish_gradient_synchronization()


def test_sparse_gradients_are_refused(ranks, hand_built):
    ranks.run(2, sparse, hand_built)
