"""Copies of a wrapped network, made in memory or through a file."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp import implementation, wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss, ranks_of, small_buckets


def goes_on(context: Context, name: str, model: nn.Module, reference: nn.Module) -> None:
    """`model` trains like `reference`, a plain network on the data of all ranks."""
    pair = Beside.__new__(Beside)
    pair.rank, pair.world_size = context.rank, context.world_size
    pair.ranks = ranks_of(context, name)
    pair.model, pair.reference = model, copy.deepcopy(reference)
    pair.scale = 1 if model.reduce == "sum" else 1 / len(pair.ranks)
    for step in range(3):
        pair.step(chain_loss(step), set_to_none=step == 0)


def deep_copies(context: Context, name: str) -> None:
    """In the middle of a step, on one rank alone, and of a copy: each is on its own."""
    pair = Beside(context, name, Chain(), **small_buckets(name))
    pair.model.reduce = "sum"
    pair.scale = 1
    pair.backward(chain_loss(0))
    twin = copy.deepcopy(pair.model)
    if context.rank == 0:
        copy.deepcopy(pair.model)
    pair.finish()
    assert type(twin) is type(pair.model)
    assert twin.reduce == "sum"
    assert twin.process_group is pair.model.process_group
    with torch.no_grad():
        for p in twin.parameters():
            assert p.grad is None
            p.mul_(0.5)
    goes_on(context, name, copy.deepcopy(twin.eval()).train(), twin.module)
    goes_on(context, name, twin.train(), twin.module)
    pair.zero_grad(set_to_none=False)
    pair.step(chain_loss(1))


def averaged(context: Context, name: str) -> None:
    """An average of the weights, as `torch.optim.swa_utils` keeps it; copied when it is frozen."""
    cls = implementation(name)
    model = cls(module=Chain().to(context.device), process_group=context.group)
    average = AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(2)
    average.update_parameters(model)
    for p, q in zip(average.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q - 1)
    average.requires_grad_(False)
    x = torch.ones(2, 6, device=context.device)
    torch.testing.assert_close(average(x), average.module.module(x))
    if not name.startswith("torch_ddp"):  # PyTorch's DDP needs something to train
        torch.testing.assert_close(copy.deepcopy(average)(x), average(x))


def through_a_file(context: Context, name: str) -> None:
    model = wrap(name, Chain().to(context.device), **small_buckets(name))
    chain_loss(0)(model, context.rank).backward()
    file = io.BytesIO()
    torch.save(model, file)
    model.finish_gradient_synchronization()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert list(loaded.state_dict()) == list(model.state_dict())
    goes_on(context, name, loaded, loaded.module)


def not_in_a_file(context: Context, name: str) -> None:
    model = wrap(name, Chain().to(context.device), process_group=context.group)
    with pytest.raises(RuntimeError, match=r"process_group .* save model\.module or model\.state"):
        torch.save(model, io.BytesIO())


def joined(context: Context, name: str) -> None:
    """Ranks with other numbers of batches take as many steps as the one that has the fewest."""
    model = wrap(name, Chain().to(context.device), process_group=context.group)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    for batches in ((3, 2), (1, 4), (2, 2)):
        steps = 0
        with model.join():
            for step in range(batches[context.rank]):
                optimizer.zero_grad()
                chain_loss(step)(model, context.rank).backward()
                model.finish_gradient_synchronization()
                optimizer.step()
                steps += 1
        assert steps == min(batches)
    with pytest.raises(ZeroDivisionError), model.join():
        raise ZeroDivisionError


@pytest.mark.parametrize("body", [deep_copies, averaged, not_in_a_file, joined])
def test_copies(ranks, implementation, body):
    ranks.run(2, body, implementation)


def test_saved_and_loaded(ranks, implementation):
    """With the default process group."""
    ranks.run(ranks.size, through_a_file, implementation)
