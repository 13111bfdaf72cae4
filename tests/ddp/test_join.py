"""Ranks with different numbers of batches, inside of `with model.join():`."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp import wrap
from lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Branches,
    Chain,
    branches_loss,
    chain_loss,
    make_optimizer,
    numbers,
    small_buckets,
    whole_values,
)


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def step_reference(pair: Beside, optimizer, losses, active: list[int], lr: float) -> None:
    """A step in one process; ranks that are not active count as zero."""
    optimizer.zero_grad()
    for loss in losses:
        total = sum(loss(pair.reference, rank) for rank in active)
        (total * pair.scale).backward()
    torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.5)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()


def step(pair: Beside, optimizer, losses, lr: float) -> None:
    """As many training loops have it, the gradients are cleared behind the forward."""
    for loss in losses[:-1]:
        with pair.model.no_sync():
            loss(pair.model, pair.rank).backward()
    value = losses[-1](pair.model, pair.rank)
    if len(losses) == 1:
        optimizer.zero_grad()
    value.backward()
    pair.model.finish_gradient_synchronization()
    pair.model.clip_grad_norm_(0.5)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    if len(losses) > 1:
        optimizer.zero_grad()


def uneven(context: Context, name: str, counts: list, micro: int, reduce: str = "mean") -> None:
    """Two epochs, and a step of all, which needs the optimizer's whole state."""
    pair = Beside(context, name, Chain(), **small_buckets(name), reduce=reduce)
    optimizer = pair.model.make_optimizer(torch.optim.AdamW)
    expected = make_optimizer(pair.reference, torch.optim.AdamW)
    for epoch in range(2):
        turned = counts[epoch:] + counts[:epoch]  # another rank ends first
        turned = [max(1, count) for count in turned]
        plan = [[chain_loss(10 * epoch + 2 * i + m) for m in range(micro)] for i in range(4)]
        with pair.model.join():
            for i in range(turned[pair.rank]):
                step(pair, optimizer, plan[i], lr=0.01 / (i + 1))
        for i in range(max(turned)):
            active = [rank for rank, count in enumerate(turned) if count > i]
            step_reference(pair, expected, plan[i], active, lr=0.01 / (i + 1))
        close(whole_values(pair.model), list(pair.reference.parameters()))
    everyone = list(range(pair.world_size))
    optimizer.zero_grad()
    step(pair, optimizer, [chain_loss(99)], lr=0.02)
    step_reference(pair, expected, [chain_loss(99)], everyone, lr=0.02)
    close(whole_values(pair.model), list(pair.reference.parameters()))
    found, wanted = optimizer.state_dict()["state"], expected.state_dict()["state"]
    for i, state in wanted.items():
        close([found[i]["exp_avg"].cpu()], [state["exp_avg"].cpu()])


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("counts", [[3, 2], [1, 3, 2]])
def test_uneven(ranks, hand_built, counts, micro):
    ranks.run(len(counts), uneven, hand_built, counts, micro)


def test_sums(ranks, hand_built):
    ranks.run(2, uneven, hand_built, [1, 2], 1, "sum")


class Normed(nn.Module):
    """With a batch norm, dropout, an output of a nested structure, and no batch for a rank."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x):
        return {"out": [self.last(torch.dropout(self.norm(self.first(x)), 0.5, self.training))]}


def without_batches(context: Context, name: str) -> None:
    """Rank 0 has no batch. What ranks with data compute is untouched, buffers are theirs."""
    model = wrap(name, Normed().to(context.device), process_group=context.group)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)

    def train(seed: int) -> None:
        optimizer.zero_grad()
        x = numbers(8, 6, seed=seed, rank=context.rank, like=model)
        model(x)["out"][0].square().mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    if name == "fsdp":
        with pytest.raises(RuntimeError, match=r"rank 0 has no batch .*zero2"):
            forwards(context, model, context.rank)
        return
    state = torch.get_rng_state()
    with model.join():
        for seed in range(2 * context.rank):
            train(seed)
    assert context.rank or torch.equal(torch.get_rng_state(), state)
    assert model.module.norm.num_batches_tracked == 2
    told: list = [None] * context.world_size
    mine = [t.detach().cpu() for t in (*whole_values(model), *model.buffers())]
    dist.all_gather_object(told, mine, group=context.group)
    assert all(map(torch.equal, told[0], told[1]))
    train(5)


def test_a_rank_without_batches(ranks, hand_built):
    ranks.run(2, without_batches, hand_built)


def even(context: Context, name: str) -> None:
    """With equal numbers of batches, and for one rank, nothing changes."""
    values = []
    for block in (True, False):
        torch.manual_seed(0)
        model = wrap(name, Chain().to(context.device), process_group=context.group)
        optimizer = model.make_optimizer(torch.optim.AdamW, lr=0.1)
        with model.join() if block else nullcontext():
            for i in range(2):
                optimizer.zero_grad(set_to_none=i == 0)
                chain_loss(i)(model, context.rank).backward()
                model.finish_gradient_synchronization()
                optimizer.step()
                with torch.no_grad():
                    chain_loss(i)(model.eval(), context.rank)
                model.train()
        values.append(whole_values(model))
        del model, optimizer
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("size", [1, 2])
def test_even(ranks, hand_built, size):
    ranks.run(size, even, hand_built)


def unused(context: Context, name: str) -> None:
    """What no rank with data uses has no gradient, so that weight decay leaves it alone."""
    network = Branches(3).to(context.device)
    model = wrap(name, network, process_group=context.group, find_unused_parameters=True)
    optimizer = model.make_optimizer(torch.optim.AdamW, lr=0.1)
    with model.join():
        for i in range(1 + context.rank):
            optimizer.zero_grad()
            branches_loss(i, lambda rank, i=i: [i])(model, context.rank).backward()
            model.finish_gradient_synchronization()
            if i:
                before = whole_gradients_are_none(model)
                assert before == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
            optimizer.step()


def whole_gradients_are_none(model: nn.Module) -> list[bool]:
    return [p.grad is None for p in model.module.parameters()]


@pytest.mark.parametrize("name", ["ddp", "ddp_bucketed", "zero1"])
def test_unused_parameters(cpu_ranks, name):
    cpu_ranks.run(2, unused, name)


class Nested(nn.Module):
    """Blocks in blocks, one of which is frozen, and an embedding of which few rows are used."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(50, 4)
        inner = [nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2)]
        self.outer = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), *layers) for layers in inner)
        self.outer[0].requires_grad_(False)

    def forward(self, rows):
        x = self.rows(rows)
        for block in self.outer:
            x = x + block(x).tanh()
        return x


def nested(context: Context, name: str, options: dict) -> None:
    """`units` of `fsdp` that contain others, and rows that `sparse_embeddings` leaves out."""
    pair = Beside(context, name, Nested(), **options)
    optimizer = pair.model.make_optimizer(torch.optim.Adam, lr=0.1)
    expected = make_optimizer(pair.reference, torch.optim.Adam, lr=0.1)

    def loss(i):
        return lambda model, rank: model(torch.tensor([i, rank, 7])).square().sum()

    with pair.model.join():
        for i in range(2 + pair.rank):
            step(pair, optimizer, [loss(i)], lr=0.1)
    for i, active in enumerate([[0, 1], [0, 1], [1]]):
        step_reference(pair, expected, [loss(i)], active, lr=0.1)
    close(whole_values(pair.model), list(pair.reference.parameters()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fsdp", {"units": (nn.Sequential, nn.Linear)}),
        ("ddp_bucketed", {"sparse_embeddings": True}),
        ("ddp_individual_v2", {"sparse_embeddings": True}),
    ],
)
def test_nested_blocks_and_sparse_rows(cpu_ranks, name, options):
    cpu_ranks.run(2, nested, name, options)


def plain(context: Context, name: str) -> None:
    """An optimizer that the wrapper has not made."""
    pair = Beside(context, name, Chain())
    optimizer = torch.optim.Adam(pair.model.parameters(), lr=0.1)
    with pair.model.join():
        for i in range(1 + pair.rank):
            optimizer.zero_grad()
            chain_loss(i)(pair.model, pair.rank).backward()
            pair.model.finish_gradient_synchronization()
            optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_plain_optimizer(cpu_ranks):
    cpu_ranks.run(2, plain, "ddp_individual")


def forwards(context: Context, model: nn.Module, count: int, backward: bool = True) -> None:
    """Trains in a block, without an optimizer; then leaves it."""
    with model.join():
        for i in range(count):
            loss = chain_loss(i)(model, context.rank)
            if backward:
                loss.backward()
                model.finish_gradient_synchronization()


def refused(context: Context, name: str) -> None:
    def fresh() -> nn.Module:
        return wrap(name, Chain().to(context.device), process_group=context.group)

    model = fresh()
    with pytest.raises(RuntimeError, match="leave out the inner one"), model.join(), model.join():
        pass
    with pytest.raises(RuntimeError, match=r"not finished on rank 0: .*no_sync"):
        forwards(context, model, 2, backward=False)
    model = fresh()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) before each step"):
        forwards(context, model, 2)
    model = fresh()
    model.gradients_come_by_hand = True
    with pytest.raises(RuntimeError, match="private engine"), model.join():
        pass
    model = fresh()
    with pytest.raises(ZeroDivisionError), model.join():
        _ = 1 / 0
    chain_loss(0)(model, context.rank).backward()  # as before
    model.finish_gradient_synchronization()


def test_refused(ranks, hand_built):
    ranks.run(2, refused, hand_built)


def evaluates(context: Context, name: str) -> None:
    """An evaluation forward of `fsdp` is a call of all ranks, of which one has ended."""
    model = wrap(name, Chain().to(context.device), process_group=context.group)

    def train_and_evaluate() -> None:
        with model.join():
            chain_loss(0)(model, context.rank).backward()
            model.finish_gradient_synchronization()
            if context.rank:
                with torch.no_grad():
                    chain_loss(0)(model, context.rank)

    with pytest.raises(RuntimeError, match=r"the end of model\.join\(\)"):
        train_and_evaluate()


def test_evaluation_by_some(cpu_ranks):
    cpu_ranks.run(2, evaluates, "fsdp")
