"""`fsdp`: networks and steps of other kinds than a chain of blocks, each beside one process."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.sharded.fsdp import HandBuiltFSDP
from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.sharded.test_fsdp import Network, Pair, loss_of, tied, tokens
from tests.support.on_ranks import on_ranks


class Part(nn.Module):
    """A block of which a part is used where it is told."""

    def __init__(self):
        super().__init__()
        self.always, self.extra = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return self.extra(x) if uses else x


class Partly(Network):
    """`uses[rank]` is set before each forward: are the extra parts of blocks, and one between?"""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Part() for _ in range(3))
        self.adapter = nn.Linear(6, 6)
        self.uses = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for k, block in enumerate(self.blocks):
            x = x + block(x, self.uses)
            if k == 1 and self.uses:
                x = x + self.adapter(x)
        return self.head(x)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_parts_of_blocks_and_between_blocks_are_unused(
    context: Context, param_dtype: torch.dtype | None
) -> None:
    """On some ranks, on all, on none; two backwards in a step, the second with less or more."""
    pair = Pair(context, Partly(), find_unused_parameters=True, param_dtype=param_dtype)
    plans = [
        [(1, 0)],
        [(0, 1)],
        [(0, 0)],
        [(1, 1)],
        [(0, 1), (1, 0)],
        [(1, 1), (0, 0)],
        [(0, 0), (1, 0)],
    ]
    for step, plan in enumerate(plans):
        for turn, uses in enumerate(plan):
            pair.model.module.uses = bool(uses[context.rank])
            loss_of(pair.model, 10 * step + turn, context.rank).backward()
            for rank in range(2):
                pair.reference.uses = bool(uses[rank])
                (pair.scale * loss_of(pair._reference, 10 * step + turn, rank)).backward()
        pair.finish(error=2e-2 if param_dtype else 0.0)
        if param_dtype is None:
            pair.step()
        pair.model.zero_grad()
        pair.reference.zero_grad()


class Experts(nn.Module):
    """Blocks inside of a block, whose own layers compute before and behind them."""

    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        for expert in self.experts:
            x = x + torch.tanh(expert(x))
        return self.behind(x)


def checkpointed() -> nn.Module:
    return Network(checkpointed=True)


def frozen() -> nn.Module:
    network = Network()
    network.embedding.weight.requires_grad_(False)
    network.blocks[1].requires_grad_(False)
    network.blocks[2][0].weight.requires_grad_(False)
    return network


def nested() -> nn.Module:
    network = Network()
    network.blocks = nn.ModuleList([Experts(), nn.Linear(6, 6), Experts()])
    return network


def nested_and_frozen() -> nn.Module:
    """The outer blocks have frozen layers, which backward uses behind their inner blocks."""
    network = nested()
    for k in (0, 2):
        network.blocks[k].before.requires_grad_(False)
        network.blocks[k].experts[1].requires_grad_(False)
    return network


def tied_blocks() -> nn.Module:
    """Two blocks share a weight, which is then in no block."""
    network = Network()
    network.blocks[2][0].weight = network.blocks[0][0].weight
    return network


class Low(nn.Module):
    """A frozen layer with a trained update of rank 1."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(1, layer.in_features))
        self.b = nn.Parameter(torch.randn(layer.out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.t() @ self.b.t()


def low_rank() -> nn.Module:
    network = Network(checkpointed=True).requires_grad_(False)
    for block in network.blocks:
        block[0], block[2] = Low(block[0]), Low(block[2])
    return network


class Repeated(Network):
    """Each block computes twice, in turn and one behind the other."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for k in (0, 1, 0, 1, 2, 2):
            x = x + self.blocks[k](x)
        return self.head(x)


class Reentrant(Network):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class TwoSegments(Network):
    """A module of no block computes in segments, of which each has a part of its gradient."""

    also_outside = False

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            y = self.shared(x).sin() if self.also_outside else 0
            x = y + checkpoint(self.shared, x, use_reentrant=True) + block(x)
        return self.head(x)


class InSegmentsAndOutside(TwoSegments):
    """The module computes outside of the segments too: its weight is needed behind one."""

    also_outside = True


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tied, {}),
        (checkpointed, {}),
        (frozen, {}),
        (nested, {}),
        (nested_and_frozen, {}),
        (nested, {"units": (Experts, nn.Linear)}),
        (tied_blocks, {}),
        (low_rank, {}),
        (Repeated, {}),
        (Reentrant, {}),
        (TwoSegments, {"find_unused_parameters": True}),
        (InSegmentsAndOutside, {"find_unused_parameters": True}),
        (Network, {"units": ()}),
    ],
)
@on_ranks(2)
def test_networks(context: Context, make: Callable[[], nn.Module], options: dict) -> None:
    torch.manual_seed(0)
    pair = Pair(context, make(), **options)
    for step in range(3):
        pair.backward(step)
        with torch.no_grad():  # evaluation before the step, and behind it
            loss_of(pair.model.eval(), 70, context.rank)
        pair.model.train()
        pair.finish()
        pair.step()
        loss_of(pair.model, 71, context.rank)  # with a graph, and no backward
        assert_freed_but_root(pair.model)


def assert_freed_but_root(model: HandBuiltFSDP) -> None:
    for block in model.blocks[1:]:
        assert not any(unit.values.untyped_storage().size() for unit in block.units), block.name


@on_ranks(2)
def test_segments_are_named(context: Context) -> None:
    model = HandBuiltFSDP(TwoSegments(), process_group=context.group)
    loss_of(model, 0, context.rank).backward()
    with pytest.raises(RuntimeError, match=r"reentrant checkpointing.*find_unused_parameters=True"):
        model.finish_gradient_synchronization()


def gradients_of(
    context: Context, network: nn.Module, autocast: bool = False, **options
) -> list[Tensor]:
    model = HandBuiltFSDP(copy.deepcopy(network), process_group=context.group, **options)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = loss_of(model, 0, context.rank)
    loss.backward()
    model.finish_gradient_synchronization()
    return model.whole_gradients()


@on_ranks(2)
def test_checkpointing_in_16_bit(context: Context) -> None:
    """Recomputing gives the same, bit for bit, in each kind of mixed precision."""
    torch.manual_seed(0)
    network = Network()
    kinds = [Network(checkpointed=True), Reentrant()]
    for precision in ({"param_dtype": torch.bfloat16}, {"autocast": True}):
        expected = gradients_of(context, network, **precision)
        for other in kinds:
            other.load_state_dict(network.state_dict())
            for g, e in zip(gradients_of(context, other, **precision), expected, strict=True):
                assert g.dtype == torch.float32
                assert torch.equal(g, e)
        coarse = network.bfloat16() if "param_dtype" in precision else network
        for p in coarse.parameters():
            p.grad = None
        for rank in range(2):
            with (
                torch.autocast("cpu", torch.bfloat16) if "autocast" in precision else nullcontext()
            ):
                loss = loss_of(coarse, 0, rank) / 2
            loss.backward()
        for p, e in zip(coarse.parameters(), expected, strict=True):
            torch.testing.assert_close(e, p.grad.float(), rtol=2e-2, atol=2e-3)
        network.float()


@on_ranks(2)
def test_another_order_is_refused(context: Context) -> None:
    """In the first forward on every rank, before anything is gathered; later, where it differs."""

    class Chosen(Network):
        order = (0, 1, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for k in self.order:
                x = self.blocks[k](x)
            return self.head(x)

    model = HandBuiltFSDP(Chosen(), process_group=context.group)
    for order, says in (((0, 2), r"blocks\.1 on rank 0, blocks\.2"), ((0,), "end of the forward")):
        model.module.order = order if context.rank else (0, 1, 2)
        with pytest.raises(RuntimeError, match=rf"in different orders: .*{says}"):
            model(tokens(0, 0))
    model.module.order = (0, 1, 2)
    loss_of(model, 0, context.rank).backward()
    model.finish_gradient_synchronization()
    for order, says in (
        ((0, 2, 1), r"blocks\.2 is called where .* blocks\.1 was"),
        ((0, 1, 2, 0), r"blocks\.0 is called where .* the forward ended"),
        ((0,), r"has not called blocks\.1, blocks\.2"),
    ):
        model.module.order = order
        with pytest.raises(RuntimeError, match=says):
            model(tokens(0, 0))
    model.module.order = (0, 1, 2)
    loss_of(model, 0, context.rank).backward()
    model.finish_gradient_synchronization()
    assert not any(g.isnan().any() for g in model.whole_gradients())


def freed_in_backward(context: Context) -> None:
    """Frozen blocks, and those of a backward by `autograd.grad`, are freed when the next begins."""
    whole: list[int] = []

    class Counting(HandBuiltFSDP):
        def enter_backward(self, way, place):
            super().enter_backward(way, place)
            units = [block.units for block in self.blocks[1:]]
            whole.append(sum(any(u.values.untyped_storage().size() for u in us) for us in units))

    network = Network(depth=5)
    network.blocks.requires_grad_(False)
    network.blocks[1].requires_grad_(True)
    model = Counting(network, process_group=context.group)
    loss_of(model, 0, context.rank).backward()
    torch.autograd.grad(
        loss_of(model, 0, context.rank), [model.module.head.weight, model.module.embedding.weight]
    )
    assert len(whole) == 12
    assert max(whole) == 2


def gathered_before_the_step(context: Context) -> None:
    """A gather that a forward has started for itself is not that of the next step."""
    pair = Pair(context, Network())
    pair.backward(0)
    pair.finish()
    model = pair.model
    model.gather(model.root)
    for optimizer in (pair.optimizer, pair.other):
        optimizer.step()
        optimizer.zero_grad()
    pair.backward(1)
    pair.finish()


def order_of_the_wire(context: Context) -> None:
    """A weight of no block is used inside of one on rank 0, and known to be unused on rank 1.

    There its reduction must wait, because backward still needs the frozen layer of a block before.
    """
    order: list[str] = []

    class Noting(HandBuiltFSDP):
        def start(self, units):
            order.extend(f"gather {u.name}" for u in units if not u.values.untyped_storage().size())
            super().start(units)

        def launch(self, bucket):
            work = super().launch(bucket)
            order.append(f"reduce {self.gradients.show(bucket.members)}")
            return work

    network = Partly()
    network.blocks[1].extra = network.adapter
    frozen = nn.Linear(6, 6).requires_grad_(False)
    network.blocks[2].always = nn.Sequential(frozen, nn.Linear(6, 6))
    model = Noting(network, process_group=context.group, find_unused_parameters=True)
    for step in range(3):
        network.uses = context.rank == 0
        loss_of(model, step, context.rank).backward()
        model.finish_gradient_synchronization()
        assert not any(g.isnan().any() for *_, g in model.gradient_pieces())
        model.zero_grad()
    everyone: list[list[str]] = [[]] * 2
    dist.all_gather_object(everyone, order, group=context.group)
    assert everyone[0] == everyone[1]


@pytest.mark.parametrize("body", [freed_in_backward, gathered_before_the_step, order_of_the_wire])
def test_order_and_memory(cpu_ranks, body):
    cpu_ranks.run(2, body)
