"""`gradient_ready` driven by hand, as the private engine does: no autograd hook speaks."""

import pytest
import torch

from ddp import wrap
from tests.ddp.beside import Chain, chain_loss, small_buckets
from tests.ranks import Context


def clipped_sum(rank: int, step: int, index: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + index)
    return torch.randn(like.shape, generator=generator).to(like.device)


def order_of(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def driven_by_hand(context: Context, name: str) -> None:
    """Fresh tensors in arbitrary order, another on each rank; `sum` is switched on afterwards."""
    model = wrap(name, Chain().to(context.device), process_group=context.group)
    check_driven_by_hand(context, model)
    options = small_buckets(name)
    model = wrap(name, Chain().to(context.device), process_group=context.group, **options)
    check_driven_by_hand(context, model)


def check_driven_by_hand(context: Context, model: torch.nn.Module) -> None:
    model.reduce = "sum"
    assert model.reduce == "sum"
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(5):
        if step < 3:  # with a forward before it, and without
            x = chain_loss(step)(model, context.rank)
            assert x.requires_grad
        for i in order_of(len(parameters), seed=step * 10 + context.rank * (step > 1)):
            parameters[i].grad = clipped_sum(context.rank, step, i, parameters[i])
            model.gradient_ready(parameters[i])
        model.finish_gradient_synchronization()
        for i, p in enumerate(parameters):
            expected = sum(clipped_sum(r, step, i, p) for r in range(context.world_size))
            torch.testing.assert_close(p.grad, expected)
        model.finish_gradient_synchronization()  # does nothing
        torch.testing.assert_close(p.grad, expected)
        optimizer.step()
        if step % 2:
            optimizer.zero_grad(set_to_none=step == 3)


def accumulated_by_hand(context: Context, name: str) -> None:
    """Microbatches of the engine: its sums grow under `no_sync`, and travel once."""
    model = wrap(name, Chain().to(context.device), process_group=context.group, reduce="sum")
    parameters = list(model.parameters())
    for step in range(3):
        for micro in range(3):
            for i, p in enumerate(parameters):
                mine = clipped_sum(context.rank, 3 * step + micro, i, p)
                p.grad = mine if micro == 0 else p.grad + mine
                if micro == 2:
                    model.gradient_ready(p)
                else:
                    with model.no_sync():
                        model.gradient_ready(p)
        model.finish_gradient_synchronization()
        for i, p in enumerate(parameters):
            expected = sum(
                clipped_sum(r, 3 * step + m, i, p)
                for r in range(context.world_size)
                for m in range(3)
            )
            torch.testing.assert_close(p.grad, expected)


def by_hand_and_by_autograd(context: Context, name: str) -> None:
    """A private step, then an ordinary one."""
    model = wrap(name, Chain().to(context.device), process_group=context.group)
    parameters = list(model.parameters())
    for step in range(4):
        if step % 2:
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, float(context.rank + i))
                model.gradient_ready(p)
            model.finish_gradient_synchronization()
            mean = sum(range(context.world_size)) / context.world_size
            for i, p in enumerate(parameters):
                torch.testing.assert_close(p.grad, torch.full_like(p, mean + i))
        else:
            chain_loss(step)(model, context.rank).backward()
            model.finish_gradient_synchronization()
            got = [p.grad.clone() for p in parameters]
            model.zero_grad()
            for rank in range(context.world_size):
                loss = chain_loss(step)(model.module, rank) / context.world_size
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = g if p.grad is None else p.grad + g
            for p, g in zip(parameters, got, strict=True):
                torch.testing.assert_close(g, p.grad)
        model.zero_grad()


def refused(context: Context, name: str) -> None:
    model = wrap(name, Chain().to(context.device), process_group=context.group)
    with pytest.raises(ValueError, match="gradient_ready"):
        model.gradient_ready(torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight has no gradient"):
        model.gradient_ready(model.module.layers[1].weight)
    with pytest.raises(ValueError, match=r"reduce: 'median' is unknown.*mean, sum"):
        model.reduce = "median"


def incomplete(context: Context, name: str) -> None:
    model = wrap(name, Chain().to(context.device), process_group=context.group)
    for p in list(model.parameters())[2:]:
        p.grad = torch.ones_like(p)
        model.gradient_ready(p)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight, layers\.0\.bias got no gradient"):
        model.finish_gradient_synchronization()
    check_driven_by_hand(context, model)


@pytest.mark.parametrize(
    "body", [driven_by_hand, accumulated_by_hand, by_hand_and_by_autograd, refused, incomplete]
)
def test_gradient_ready(ranks, implementation, body):
    ranks.run(2, body, implementation)


def test_gradient_ready_on_three_ranks(ranks, implementation):
    ranks.run(min(3, ranks.size), driven_by_hand, implementation)
