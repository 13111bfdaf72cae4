"""Parameters that change under a wrapper: what is right, what is said, and what is no fault."""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss, is_sharded, numbers, wrapped

FORGOTTEN = r"weight|bias.* changed after its backward .* call finish_gradient_synchronization\(\)"


def says(model: nn.Module, case: str, rank: int) -> None:
    if case == "finish":
        model.finish_gradient_synchronization()
    else:
        chain_loss(1)(model, rank)


def plain(cls: type, params: Iterable, **options) -> torch.optim.Optimizer:
    return cls(params, **options)


def forgotten_finish(context: Context, name: str) -> None:
    """The next forward says so, or a late finish; in between, evaluation hides nothing."""
    for case in ("forward", "finish", "evaluation", "eval mode", "under no_sync", "unused"):
        model = wrapped(context, name, find_unused_parameters=case == "unused")
        fused = case in ("finish", "eval mode") and not is_sharded(model)
        make = model.make_optimizer if fused else plain  # it writes without counting
        optimizer = make(torch.optim.AdamW, model.parameters(), lr=0.1, fused=fused)
        chain_loss(0)(model, context.rank).backward()
        if is_sharded(model):  # buckets that are on their way refuse a plain step at once
            with pytest.raises(RuntimeError, match=r"divided .*model\.make_optimizer"):
                optimizer.step()
            model.zero_grad()
            continue
        if case == "evaluation":
            model.eval()
            with torch.no_grad():
                chain_loss(5)(model, context.rank)
                optimizer.step()
                chain_loss(5)(model, context.rank)
            model.train()
        else:
            optimizer.step()
        optimizer.zero_grad()
        model.train(case != "eval mode")
        context_of_forward = model.no_sync() if case == "under no_sync" else nullcontext()
        with context_of_forward, pytest.raises(RuntimeError, match=FORGOTTEN):
            says(model, case, context.rank)
        model = wrap(name, model.module, process_group=context.group)  # the remedy
        chain_loss(1)(model, context.rank).backward()
        model.finish_gradient_synchronization()


class Renormalised(nn.Module):
    """Each forward writes to its table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6, max_norm=0.5)
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        tokens = (x[:, 0].abs() * 10).long() % 7
        return self.last(self.table(tokens))


def no_fault(context: Context, name: str) -> None:
    """Abandoned gradients, a loaded checkpoint, another network's step, a forward that writes."""
    pair = Beside(context, name)
    saved = copy.deepcopy(pair.model.state_dict())
    chain_loss(0)(pair.model, context.rank).backward()
    pair.model.load_state_dict(saved)
    pair.zero_grad(set_to_none=True)
    pair.step(chain_loss(1))
    other = nn.Linear(2, 2).to(context.device)
    other(torch.ones(1, 2, device=context.device)).sum().backward()
    chain_loss(0)(pair.model, context.rank).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    pair.zero_grad(set_to_none=True)
    pair.step(chain_loss(2))

    pair = Beside(context, name, Renormalised())
    for _ in range(2):
        pair.backward(chain_loss(1))
        for module in (pair.model, pair.reference):
            module.eval()
            chain_loss(3)(module, context.rank)
            module.train()
        pair.backward(chain_loss(2))
        pair.finish()
        pair.zero_grad(set_to_none=True)


def replaced(context: Context, name: str, change: Callable, which: int = 1) -> None:
    """It is named at the next forward with gradients, with or without unused parameters."""
    for unused in (False, True):
        network = Chain().to(context.device)
        network.layers[1].requires_grad_(change is not thaw)
        model = wrapped(context, name, network, find_unused_parameters=unused)
        change(model)
        for training in (True, False):
            model.train(training)
            with pytest.raises(RuntimeError, match=rf"layers\.{which}\.weight is trainable, but"):
                chain_loss(0)(model, context.rank)
        Beside(context, name, network).step(chain_loss(1))  # the remedy


def load(model: nn.Module) -> None:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def thaw(model: nn.Module) -> None:
    model.module.layers[1].requires_grad_(True)


def loaded_by_assignment(context: Context, name: str) -> None:
    replaced(context, name, load, which=0)


def loaded_behind_the_wrapper(context: Context, name: str) -> None:
    def load(model: nn.Module) -> None:
        state = {key.removeprefix("module."): x.clone() for key, x in model.state_dict().items()}
        model.module.load_state_dict(state, assign=True)

    replaced(context, name, load, which=0)


def another_layer(context: Context, name: str) -> None:
    def replace(model: nn.Module) -> None:
        model.module.layers[1] = nn.Linear(6, 6).to(context.device)

    replaced(context, name, replace)


def converted(context: Context, name: str) -> None:
    """Autograd has no hooks of the wrapper any more, also if it is converted back."""

    def step(model: nn.Module, convert: Callable) -> None:
        convert(model.module)
        x = numbers(4, 6, seed=0, rank=0, like=model).to(next(model.parameters()).dtype)
        model(x).sum().backward()
        model.finish_gradient_synchronization()

    for convert in (nn.Module.double, lambda network: network.bfloat16().float()):
        model = wrapped(context, name)
        with pytest.raises(RuntimeError, match=r"was converted, .* wrap it again"):
            step(model, convert)


def thawed(context: Context, name: str) -> None:
    replaced(context, name, thaw)


def functional_call(context: Context, name: str) -> None:
    """Other tensors in place of the parameters, for one call, as in meta-learning."""
    pair = Beside(context, name)
    x = numbers(4, 6, seed=1, rank=context.rank, like=pair.model)
    halves = {n: p * 0.5 for n, p in pair.model.named_parameters()}
    loss = torch.func.functional_call(pair.model, halves, (x,)).square().sum()
    loss.backward()
    for rank in pair.ranks:
        x = numbers(4, 6, seed=1, rank=rank, like=pair.model)
        halves = {n: p * 0.5 for n, p in pair.reference.named_parameters()}
        loss = torch.func.functional_call(pair.reference, halves, (x,)).square().sum()
        (loss * pair.scale).backward()
    pair.finish()


def frozen_phase(context: Context, name: str) -> None:
    """Nothing of it is trained for a while, and gradients pass through it."""
    for unused in (False, True):
        for reduce in ("mean", "sum"):
            pair = Beside(context, name, find_unused_parameters=unused, reduce=reduce)
            for step in range(4):
                frozen = step % 2 == 1
                pair.model.requires_grad_(not frozen)
                if frozen:
                    x = numbers(4, 6, seed=step, rank=context.rank, like=pair.model)
                    pair.model(x.requires_grad_()).sum().backward()
                    assert x.grad is not None
                    pair.finish()
                else:
                    pair.step(chain_loss(step))


@pytest.mark.parametrize(
    "body",
    [
        *(forgotten_finish, no_fault, functional_call, frozen_phase, loaded_by_assignment),
        *(loaded_behind_the_wrapper, another_layer, converted, thawed),
    ],
)
def test_parameters_that_change(ranks, implementation, body):
    ranks.run(2, body, implementation)
