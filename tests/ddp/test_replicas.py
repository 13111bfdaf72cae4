"""Buffers follow rank 0 before each synchronising training forward, and only then."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import whole_gradients, whole_parameters, wrapped


class Noted(nn.Module):
    """Batch norm, and buffers of other types that each forward notes down as it found them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.register_buffer("strided", torch.zeros(2, 3).t())

    def forward(self, x):
        self.found = {n: b.clone() for n, b in self.named_buffers()}
        return self.norm(x)


def build(context: Context, name: str) -> nn.Module:
    module = Noted()
    for buffer in module.buffers():
        buffer.fill_(context.rank + 5)
    return wrapped(context, name, module)


def data(context: Context) -> torch.Tensor:
    """Another distribution on each rank."""
    return (torch.randn(6, 3) * (1 + context.rank) + 10 * context.rank).to(context.device)


def of_rank_0(context: Context, tensor: torch.Tensor) -> torch.Tensor:
    everyone = [torch.empty_like(tensor).contiguous() for _ in range(context.world_size)]
    dist.all_gather(everyone, tensor.contiguous(), group=context.group)
    return everyone[0]


def spoil(context: Context, model: nn.Module) -> dict[str, torch.Tensor]:
    for buffer in model.buffers():
        buffer.fill_(context.rank + 20)
    return {n: b.clone() for n, b in model.module.named_buffers()}


def in_step(context: Context, name: str) -> None:
    model = build(context, name)
    for buffer_name, buffer in model.module.named_buffers():
        assert (buffer == 5).all(), f"{buffer_name} is not rank 0's after construction: {buffer}"

    for _ in range(3):
        before = {n: of_rank_0(context, b) for n, b in model.module.named_buffers()}
        model(data(context)).sum().backward()
        model.finish_gradient_synchronization()
        for buffer_name, found in model.module.found.items():
            torch.testing.assert_close(found, before[buffer_name], rtol=0, atol=0)
        assert model.module.norm.running_mean.mean() > -5
        spoil(context, model)


def left_alone(context: Context, name: str) -> None:
    """No broadcast in eval, without gradients under no_sync: what a rank has, it keeps."""
    model = build(context, name)
    model(data(context)).sum().backward()
    model.finish_gradient_synchronization()

    mine = spoil(context, model)
    with model.no_sync():
        model(data(context)).sum().backward()
    assert_found(model, mine)
    model(data(context)).sum().backward()
    assert (model.module.found["count"] == 20).all()
    model.finish_gradient_synchronization()

    mine = spoil(context, model)
    model.eval()
    model(data(context))
    assert_found(model, mine)


def assert_found(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, found in model.module.found.items():
        assert torch.equal(found, expected[name]), f"{name}: {found} instead of {expected[name]}"


def one_rank_evaluates(context: Context, name: str) -> None:
    """A broadcast on this rank alone would hang, or be mixed up with the next collective."""
    model = build(context, name)
    for _ in range(2):
        model(data(context)).sum().backward()
        model.finish_gradient_synchronization()
        model.eval()
        with whole_parameters(model):  # where the network is divided, a call of all ranks
            if context.rank == 1:
                with torch.no_grad():
                    for _ in range(3):
                        model(data(context))
                model(data(context))
        model.train()
    before = {n: of_rank_0(context, b) for n, b in model.module.named_buffers()}
    model(data(context)).sum().backward()
    model.finish_gradient_synchronization()
    assert_found(model, before)


def broadcast_between_two_backwards(context: Context, name: str) -> None:
    """Between backward and finish a forward's broadcast comes behind the gradients."""
    model = build(context, name)
    for _ in range(3):
        for _ in range(2):
            model(data(context)).sum().backward()
        model.finish_gradient_synchronization()
        names = [name for name, _ in model.module.named_parameters()]
        gradient = whole_gradients(model)[names.index("norm.bias")]
        torch.testing.assert_close(gradient, of_rank_0(context, gradient))
        torch.testing.assert_close(gradient, torch.full_like(gradient, 12.0))
        model.zero_grad()


class Siamese(nn.Module):
    """Batch norm and two tables; autograd saves all of them, and a centre where it is asked for.

    Args:
        centre: the name of a buffer that each forward replaces by a new tensor, and uses.
    """

    def __init__(self, centre: bool):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.rand(3))
        self.register_buffer("other_table", torch.rand(3))
        self.register_buffer("centre", torch.ones(3) if centre else None)

    def forward(self, x):
        x = self.layer(x) * self.table * self.other_table
        if self.centre is not None:
            self.centre = self.centre + x.detach().mean(0)
            x = x * self.centre
        return self.norm(x).square() + x


def two_forwards_and_one_backward(context: Context, name: str, centre: bool) -> None:
    """Gradients are those of a network that is alone, whose buffers start at rank 0's."""
    model = wrapped(context, name, Siamese(centre))
    for _ in range(3):
        start = [of_rank_0(context, b) for b in model.module.buffers()]
        with whole_parameters(model):
            own = copy.deepcopy(model.module)
        x, y = data(context), data(context)
        (model(x).square().mean() + model(y).mean()).backward()
        model.finish_gradient_synchronization()
        for buffer, value in zip(own.buffers(), start, strict=True):
            buffer.copy_(value)
        first = own(x).square().mean()
        kept = [of_rank_0(context, b) for b in own.buffers()]
        if centre:
            own.centre = own.centre.clone()
        for buffer, value in zip(own.buffers(), kept, strict=True):
            buffer.data.copy_(value)
        gradients = torch.autograd.grad(first + own(y).mean(), list(own.parameters()))
        for got, gradient in zip(whole_gradients(model), gradients, strict=True):
            dist.all_reduce(gradient, group=context.group)
            torch.testing.assert_close(got, gradient / context.world_size)
        model.zero_grad()


def test_two_forwards_and_one_backward(ranks, hand_built):
    """PyTorch's DDP does it from torch 2.13 on."""
    ranks.run(2, two_forwards_and_one_backward, hand_built, False)


def test_a_buffer_that_each_forward_replaces(ranks, hand_built):
    """PyTorch's DDP overwrites what autograd has saved of it: its gradients are wrong, silently."""
    ranks.run(2, two_forwards_and_one_backward, hand_built, True)


@pytest.mark.parametrize(
    "body", [in_step, left_alone, one_rank_evaluates, broadcast_between_two_backwards]
)
def test_buffers(ranks, implementation, body):
    ranks.run(2, body, implementation)
