"""Used rows of embeddings: the same gradients as without the option, and fewer bytes."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp import IMPLEMENTATIONS, wrap
from lm.rank_pool import Context
from tests.ddp.conftest import COPY_ENGINE, CPU_COPY_ENGINE
from tests.support.beside import Beside

VARIANTS = ["ddp_individual_v2", "ddp_bucketed", CPU_COPY_ENGINE]
VOCABULARY, WIDTH = 40, 3
DENSE = VOCABULARY * WIDTH * 4


class Tokens(nn.Module):
    """A table, a layer and a head; `use` says in which way the table is used besides."""

    def __init__(self, use: str = "", **options):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY if use == "tied" else 2, bias=False)
        if use == "tied":
            self.head.weight = self.table.weight
        self.use = use

    def forward(self, ids: Tensor) -> Tensor:
        if self.use == "checkpoint":
            x = checkpoint(self.table, ids, use_reentrant=False)
        else:
            x = self.table(ids)
        if self.use == "twice":
            x = x + self.table(ids + 1)
        if self.use == "output":
            x = F.linear(x, self.table.weight)[..., :WIDTH] + x
        if self.use == "functional":
            x = F.embedding(ids, self.table.weight)
        return self.head(torch.tanh(self.layer(x)))


def tokens(seed: int, rank: int, like: nn.Module, count: int | None = None) -> Tensor:
    """Some ids below 12 of rank 0 and above 27 of the others; as many as the rank likes."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    count = 3 + 2 * rank if count is None else count
    ids = torch.randint(12, (count,), generator=generator) + 16 * min(rank, 1)
    return ids.to(next(like.parameters()).device)


def tokens_loss(seed: int, count: int | None = None):
    return lambda model, rank: model(tokens(seed, rank, model, count)).square().sum()


def make(context: Context, name: str, network: nn.Module, **options) -> Beside:
    options = {"sparse_embeddings": True, "bucket_size_mb": 1e-4} | options
    return Beside(context, name, network, **options)


def sent(pair: Beside, name: str = "table.weight") -> int:
    """The bytes that were sent of the table, in the last step."""
    (nbytes,) = [one.nbytes for one in pair.model.launches() if name in one.names[0]]
    return nbytes


def check(pair: Beside, by_rows: bool, name: str = "table.weight") -> None:
    nbytes = sent(pair, name)
    assert (0 < nbytes < DENSE / 2) if by_rows else nbytes == DENSE, nbytes


def by_rows(context: Context, name: str) -> None:
    for reduce in ("mean", "sum"):
        for options in ({}, {"padding_idx": 3}, {"scale_grad_by_freq": True}):
            torch.manual_seed(0)
            pair = make(context, name, Tokens(**options), reduce=reduce)
            for step in range(4):
                pair.step(tokens_loss(step))
                check(pair, by_rows=step > 0)
                assert pair.model.module.table.weight.grad is None


def counts_what_is_sent(context: Context, name: str) -> None:
    pair = make(context, name, Tokens())
    for _ in range(2):
        pair.step(lambda model, rank: model(torch.tensor([2, 5, 5]) + rank).sum())
    assert sent(pair) == 4 * WIDTH * 4  # rows 2, 3, 5, 6
    others = sum(p.numel() * 4 for p in [*pair.model.module.layer.parameters()])
    others += pair.model.module.head.weight.numel() * 4
    assert pair.model.stats()["bytes"] == 4 * WIDTH * 4 + others + VOCABULARY
    assert pair.model.stats()["collectives"] == pair.model.stats()["buckets"] + 1


def whole_for_good(context: Context, name: str) -> None:
    """What the first step shows, or the network itself, is not tried again."""
    for use in ("tied", "output", "functional", "twice"):
        torch.manual_seed(0)
        pair = make(context, name, Tokens(use))
        for step in range(3):
            pair.step(tokens_loss(step))
            dense = [one for one in pair.model.launches() if "table.weight" in str(one.names)]
            assert sum(one.nbytes for one in dense) >= DENSE
        assert pair.model.stats()["collectives"] == pair.model.stats()["buckets"]


def used_by_the_loss(context: Context, name: str) -> None:
    """Outside of the network's forward."""

    def loss(model, rank):
        table = getattr(model, "module", model).table
        return tokens_loss(1)(model, rank) + table.weight.square().sum()

    pair = make(context, name, Tokens())
    for _ in range(3):
        pair.step(loss)
        assert pair.model.stats()["bytes"] >= DENSE


def gradient_hooks(context: Context, name: str) -> None:
    """They may fill rows: before it is accumulated, memory of which may be used again, or after."""
    for kind in ("tensor", "accumulated", "replaced"):
        torch.manual_seed(0)
        pair = make(context, name, Tokens())
        weight, other = pair.model.module.table.weight, pair.reference.table.weight
        if kind == "tensor":
            for parameter, scale in ((weight, 1.0), (other, 1.0)):
                parameter.register_hook(lambda g, s=scale: g + s)
                parameter.register_hook(lambda g: g * 2)
        else:

            def fill(p, kind=kind):
                gradient = p.grad + 1
                p.grad = None
                p.grad = gradient * 2 if kind == "replaced" else gradient

            weight.register_post_accumulate_grad_hook(fill)
        for step in range(3):
            pair.backward(tokens_loss(step))
            if kind != "tensor":
                other.grad = (other.grad + 1) * (2 if kind == "replaced" else 1)
            pair.finish()
            assert pair.model.stats()["bytes"] >= DENSE
            pair.zero_grad(set_to_none=True)


def accumulation(context: Context, name: str) -> None:
    """Under no_sync by rows, with those of each forward, whose ids may be overwritten since."""
    pair = make(context, name, Tokens())
    pair.step(tokens_loss(0))
    for step in range(1, 3):
        ids = torch.zeros(4, dtype=torch.long, device=context.device)
        for micro in range(3):
            with pair.model.no_sync():
                ids.copy_(tokens(10 * step + micro, context.rank, pair.model, 4))
                pair.model(ids).square().sum().backward()
            pair.reference_backward(tokens_loss(10 * step + micro, 4))
        pair.step(tokens_loss(step))
        check(pair, by_rows=True)


def several_rounds(context: Context, name: str) -> None:
    """Two backwards and one finish; gradients that are never zeroed, or in place: whole, exact."""
    for reduce in ("mean", "sum"):
        pair = make(context, name, Tokens(), reduce=reduce)
        for step in range(3):
            pair.backward(tokens_loss(step))
            pair.step(tokens_loss(step + 9))
        assert [one.nbytes for one in pair.model.launches() if "table.weight" in one.names][1] == (
            DENSE
        )
        for step in range(3):
            pair.backward(tokens_loss(step))
            pair.finish()  # the next step adds to this one's gradients
            check(pair, by_rows=step == 0)
        pair.zero_grad(set_to_none=False)
        pair.step(tokens_loss(4))
        check(pair, by_rows=False)
        pair.step(tokens_loss(5))
        check(pair, by_rows=True)


def several_forwards(context: Context, name: str) -> None:
    pair = make(context, name, Tokens())
    pair.step(tokens_loss(0))
    pair.step(lambda m, r: tokens_loss(1)(m, r) + tokens_loss(2)(m, r))
    check(pair, by_rows=False)
    pair.step(tokens_loss(3))
    check(pair, by_rows=True)
    first, second = tokens_loss(5), tokens_loss(6)
    losses = [loss(pair.model, context.rank) for loss in (first, second)]
    for loss, value in zip((first, second), losses, strict=True):  # two steps, two graphs
        value.backward()
        pair.reference_backward(loss)
        pair.finish()
        pair.zero_grad(set_to_none=True)
    kept = tokens_loss(7)(pair.model, context.rank)
    for _ in range(2):  # a graph of which two steps are made
        kept.backward(retain_graph=True)
        pair.reference_backward(tokens_loss(7))
        pair.finish()
        check(pair, by_rows=True)
        pair.zero_grad(set_to_none=True)
    pair.step(tokens_loss(8))  # `kept` may run again
    check(pair, by_rows=False)
    del kept
    pair.step(tokens_loss(8))
    check(pair, by_rows=True)
    held = [tokens_loss(9)(pair.model, context.rank)]
    held[0].backward()
    pair.reference_backward(tokens_loss(9))
    pair.finish()
    pair.zero_grad(set_to_none=True)
    pair.step(tokens_loss(8))  # `held` cannot
    check(pair, by_rows=True)


def one_rank_differs(context: Context, name: str) -> None:
    """Where one rank cannot say, or has many tokens, all exchange the whole gradient."""
    pair = make(context, name, Tokens())
    pair.step(tokens_loss(0))

    def two_forwards(model, rank):
        more = tokens_loss(2)(model, rank) if rank == 1 else 0
        return tokens_loss(1)(model, rank) + more

    pair.step(two_forwards)
    check(pair, by_rows=False)
    many = torch.arange(VOCABULARY - 2, device=context.device)
    pair.step(lambda m, r: m(many).square().sum() if r == 0 else tokens_loss(1)(m, r))
    check(pair, by_rows=False)
    pair.step(tokens_loss(0))
    check(pair, by_rows=True)


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids, which=(0, 1)):
        return self.bias + sum(self.tables[i](ids + i).square().sum(1) for i in which)


def unused(context: Context, name: str) -> None:
    pair = make(context, name, TwoTables(), find_unused_parameters=True)

    def loss(seed, which):
        return lambda m, r: m(tokens(seed, r, m), which(r)).sum()

    pair.step(loss(0, lambda r: (0, 1)))
    for step, which in enumerate(([0, 1], [0], [], [1])):
        one = loss(step, lambda r, which=which: which if r == 1 else (0, 1))
        pair.step(one)
        check(pair, 0 in which, "tables.0")
        check(pair, 1 in which, "tables.1")
    pair.step(loss(1, lambda r: (0,)))
    assert pair.model.module.tables[1].weight.grad is None


def recomputed(context: Context, name: str) -> None:
    pair = make(context, name, Tokens("checkpoint"))
    for step in range(3):
        pair.step(tokens_loss(step))
        check(pair, by_rows=step > 0)


def a_later_use_is_an_error(context: Context, name: str) -> None:
    """No other rank can know of it in time. The step after it is right again."""
    pair = make(context, name, Tokens())
    for step in range(2):
        pair.step(tokens_loss(step))
    weight = pair.model.module.table.weight
    loss = tokens_loss(2)(pair.model, context.rank) + weight.sum()
    with pytest.raises(RuntimeError, match=r"sparse_embeddings=False") as error:
        loss.backward()
    assert "table.weight" in str(error.value)
    pair.zero_grad(set_to_none=True)
    for step in range(2):
        pair.step(tokens_loss(step))
        check(pair, by_rows=True)


def by_hand(context: Context, name: str) -> None:
    pair = make(context, name, Tokens(), reduce="sum")
    pair.step(tokens_loss(0))
    model, pending = pair.model, tokens_loss(1)(pair.model, context.rank)
    for parameter in model.module.parameters():
        model.before_gradient(parameter)
        parameter.grad = torch.full_like(parameter, 1.0 + context.rank)
        model.gradient_ready(parameter)
    model.finish_gradient_synchronization()
    total = sum(range(1, context.world_size + 1))
    assert all(bool((p.grad == total).all()) for p in model.module.parameters())
    del pending


def copies(context: Context, name: str) -> None:
    pair = make(context, name, Tokens())
    for step in range(2):
        pair.step(tokens_loss(step))
    pickle.dumps(pair.model.module)
    twin = copy.deepcopy(pair.model)
    pair.model = twin
    for step in range(3):
        pair.reference.load_state_dict(twin.module.state_dict())
        pair.step(tokens_loss(step))
    check(pair, by_rows=True)
    assert not twin.module.table._forward_hooks


def another_type(context: Context, name: str) -> None:
    """bfloat16 tables; in float32 their gradients are others than autograd's, and whole."""
    pair = make(context, name, Tokens().bfloat16())
    for step in range(3):
        pair.step(tokens_loss(step))
    assert 0 < sent(pair) < DENSE / 4
    pair.model.gradient_dtype = torch.float32
    tokens_loss(4)(pair.model, context.rank).backward()
    pair.model.finish_gradient_synchronization()
    assert sent(pair) in range(1, DENSE + 1)


BODIES = [
    by_rows, counts_what_is_sent, whole_for_good, used_by_the_loss, gradient_hooks, accumulation,
    several_rounds, several_forwards, one_rank_differs, unused, recomputed, a_later_use_is_an_error,
    by_hand, copies, another_type,
]  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS, ids=["v2", "bucketed", "copy_engine"])
@pytest.mark.parametrize("body", BODIES)
def test_embeddings(cpu_ranks, body, name):
    cpu_ranks.run(2, body, name)


@pytest.mark.parametrize("name", VARIANTS, ids=["v2", "bucketed", "copy_engine"])
@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_ranks(cpu_ranks, size, name):
    cpu_ranks.run(size, by_rows, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ddp_individual_v2", "ddp_bucketed", COPY_ENGINE])
@pytest.mark.parametrize("body", [by_rows, accumulation, several_forwards, one_rank_differs])
def test_embeddings_on_gpus(gpu_ranks, body, name):
    gpu_ranks.run(2, body, name)


def without_it(context: Context) -> None:
    model = wrap("ddp_bucketed", Tokens(), process_group=context.group)
    for step in range(2):
        tokens_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()
        assert model.stats()["collectives"] == 1
        model.zero_grad()
    for name in ("ddp", "zero1"):
        with pytest.raises(TypeError, match=f"{name} has no option sparse_embeddings"):
            wrap(name, Tokens(), process_group=context.group, sparse_embeddings=True)
    with pytest.raises(TypeError, match="Zero1DDP has no option sparse_embeddings"):
        IMPLEMENTATIONS["zero1"](Tokens(), process_group=context.group, sparse_embeddings=True)


def test_the_default_is_one_bucket_with_everything(cpu_ranks):
    cpu_ranks.run(2, without_it)
