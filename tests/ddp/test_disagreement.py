"""Ranks that do not do the same, and states that only some of them are in."""

import gc
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ddp import implementation
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.conftest import HAND_BUILT, SHARDED
from tests.ddp.test_step import FailingChain
from tests.support.beside import (
    Beside,
    Branches,
    branches_loss,
    chain_loss,
    is_sharded,
    is_torch,
    numbers,
    small_buckets,
    wrapped,
)
from tests.support.differences import is_divided
from tests.support.on_ranks import on_ranks


@on_ranks(2, "ranks")
def test_gradients_have_the_strides_of_their_parameters(
    context: Context, implementation: str
) -> None:
    """A fused optimizer pairs elements by their place in memory."""
    network = nn.Conv2d(2, 3, 3).to(context.device, memory_format=torch.channels_last)
    pair = Beside(context, implementation, network)

    def loss(model, rank):
        return model(numbers(2, 2, 5, 5, seed=3, rank=rank, like=model)).square().sum()

    optimizers = pair.optimizers(torch.optim.AdamW, lr=0.1, fused=True)
    for _ in range(3):
        pair.train(optimizers, loss)
    pair.backward(loss)
    pair.finish()
    weight = pair.model.module.weight
    assert weight.grad.stride() == weight.stride() or is_sharded(pair.model)


def failed_microbatch(context: Context, name: str) -> None:
    """A backward that fails under no_sync is retried there; what it adds must not be lost."""
    pair = Beside(context, name, FailingChain())
    for step in range(2):
        with pair.model.no_sync():
            pair.model.module.fails_at = 2
            with pytest.raises(ArithmeticError):
                chain_loss(step)(pair.model, context.rank).backward()
            pair.model.module.fails_at = None
        pair.zero_grad(set_to_none=True)
        pair.backward(chain_loss(10 + step), synchronise=False)
        pair.backward(chain_loss(20 + step))
        pair.finish()
        pair.zero_grad(set_to_none=True)


def test_failed_microbatch_under_no_sync(ranks, implementation):
    if is_torch(implementation):
        pytest.skip("PyTorch's DDP drops what was accumulated after a failed backward")
    ranks.run(2, failed_microbatch, implementation)


def reduced_here(model: nn.Module) -> list[torch.Tensor]:
    if is_sharded(model):
        return [gradient for *_, gradient in model.gradient_pieces()]
    return [p.grad for p in model.parameters()]


def one_rank_discards(
    context: Context, name: str, at: int, unused: bool, before: list, reduces: bool
) -> bool:
    """Rank 0 fails and skips its batch. Is what rank 1 gets visibly no mean?"""
    options = dict(small_buckets(name), find_unused_parameters=unused)
    pair = Beside(context, name, FailingChain(), **options)
    model, is_seen = pair.model, True
    for step, is_finished in enumerate(before):
        pair.backward(chain_loss(step))
        if is_finished:
            pair.finish()
            pair.zero_grad(set_to_none=True)
    model.module.fails_at = at if context.rank == 0 else None
    with nullcontext() if reduces else model.no_sync():
        loss = chain_loss(7)(model, context.rank)
    if context.rank == 0:
        with pytest.raises(ArithmeticError):
            loss.backward()
        model.module.fails_at = None
    else:
        loss.backward()
        model.finish_gradient_synchronization()
    if context.rank == 0 or is_divided(name):
        chain_loss(8)(model, context.rank)  # the next forward discards the step
    if context.rank != 0:
        is_seen = any(g.isnan().any().item() for g in reduced_here(model))
    pair.zero_grad(set_to_none=True)
    pair.step(chain_loss(9))
    return is_seen


@pytest.mark.parametrize(
    ("at", "unused", "before", "reduces"),
    [
        (2, False, [True, True], True), (2, False, [], True), (2, True, [], True),
        (4, False, [True, False], True), (2, False, [True, False], False),
    ],
    ids=["later", "first step", "unused", "second backward", "no_sync behind another"],
)  # fmt: skip
@pytest.mark.parametrize("name", [*HAND_BUILT, *SHARDED])
def test_a_rank_that_discards_does_not_pass_for_zeros(cpu_ranks, name, at, unused, before, reduces):
    """Ranks also agree on an order in their first step, and on what is used in each."""
    if name == "fsdp" and not reduces:
        pytest.skip("the other rank waits for blocks, which this one gathers no more")
    arguments = name, at, unused, before, reduces
    assert cpu_ranks.run(2, one_rank_discards, *arguments) == [True, True]


class WithBuffer(Branches):
    def __init__(self):
        super().__init__(count=2)
        self.register_buffer("seen", torch.zeros(1))


def nothing_in_the_first(context: Context, name: str) -> None:
    """Rank 1 has no loss in the first of two microbatches, and buffers are broadcast between."""
    options = dict(small_buckets(name), find_unused_parameters=True)
    pair = Beside(context, name, WithBuffer(), **options)
    for step in range(2):
        for microbatch in range(2):
            loss = branches_loss(2 * step + microbatch, lambda r: [0, 1])
            value = loss(pair.model, context.rank)
            if not (microbatch == 0 and context.rank == 1):
                value.backward()
        value = branches_loss(2 * step, lambda r: [0, 1])(pair.reference, 0)
        ((value) * pair.scale).backward()
        pair.reference_backward(branches_loss(2 * step + 1, lambda r: [0, 1]))
        pair.finish()
        pair.zero_grad(set_to_none=True)


def test_a_rank_without_a_loss_in_one_microbatch(ranks, implementation):
    if is_torch(implementation):
        pytest.skip("PyTorch's DDP reduces in each backward and waits for all ranks there")
    ranks.run(2, nothing_in_the_first, implementation)


@pytest.mark.parametrize("name", ["ddp", "ddp_bucketed"])
@on_ranks(2)
def test_a_discarded_step_is_said(context: Context, name: str) -> None:
    model = wrapped(context, name, Branches(2))
    branches_loss(0, lambda r: [0])(model, context.rank).backward()
    with pytest.warns(UserWarning, match="discarded.*branches.1.weight, branches.1.bias"):
        branches_loss(1, lambda r: [0, 1])(model, context.rank)


@on_ranks(2)
def test_tuned_torch_ddp_learns_its_graph_first(context: Context) -> None:
    model = wrapped(context, "torch_ddp_tuned", FailingChain())
    with model.no_sync(), pytest.raises(RuntimeError, match=r"first training step .* no_sync"):
        chain_loss(0)(model, context.rank)
    for step in range(3):
        chain_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()
        assert model.stats()["collectives"] == 1
        model.zero_grad()


@dataclass
class Output:
    y: torch.Tensor


class InDataclass(FailingChain):
    def forward(self, x):
        return Output(super().forward(x))


@on_ranks(2)
def test_tuned_torch_ddp_refuses_an_output_that_it_does_not_see(context: Context) -> None:
    """Its first step would not be reduced. `torch_ddp` does it."""

    def loss(model, rank):
        return model(numbers(4, 6, seed=3, rank=rank, like=model)).y.square().sum()

    Beside(context, "torch_ddp", InDataclass()).step(loss)
    model = wrapped(context, "torch_ddp_tuned", InDataclass())
    with pytest.raises(RuntimeError, match=r"since Output hides a tensor .* use torch_ddp"):
        loss(model, context.rank)


@on_ranks(2, "ranks")
def test_gradients_outlive_the_wrapper(context: Context, implementation: str) -> None:
    network = FailingChain().to(context.device)
    model = wrapped(context, implementation, network)
    chain_loss(0)(model, context.rank).backward()
    model.finish_gradient_synchronization()
    before = [None if is_sharded(model) else p.grad.clone() for p in network.parameters()]
    del model
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    for p, expected in zip(network.parameters(), before, strict=True):
        if expected is not None:
            torch.testing.assert_close(p.grad, expected, rtol=0, atol=0, equal_nan=True)
        p.grad.zero_()


def test_a_plugin_is_loaded_again_only_if_its_file_has_changed(tmp_path):
    path = tmp_path / "plugin.py"
    for base in ("NoCommunication", "SynchronousDDP"):
        path.write_text(f"from ddp import {base}\nclass Mine({base}): pass\n")
        cls = implementation(f"{path}:Mine")
        assert cls.__base__.__name__ == base
        assert implementation(f"{path}:Mine") is cls


def test_plugin_with_a_dataclass(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from ddp import DataParallel\n"
        "@dataclass\nclass Note:\n    text: str = ''\n"
        "class Mine(DataParallel):\n    note = Note('x')\n"
    )
    cls = implementation(f"{path}:Mine")
    assert cls.note.text == "x"
