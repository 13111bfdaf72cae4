"""`fsdp`: values, memory, and what is on the wire when."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.sharded.fsdp import HandBuiltFSDP
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside
from tests.support.on_ranks import on_ranks


class Network(nn.Module):
    """An embedding, blocks of odd sizes with a norm, and a head, tied or not."""

    def __init__(self, width: int = 6, depth: int = 3, tied: bool = False, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width), nn.LayerNorm(width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (4, 5), generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    logits = model(tokens(step, rank)).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens(step + 50, rank).flatten())


def tied() -> nn.Module:
    return Network(tied=True)


class Pair(Beside):
    """The wrapped network, and its reference on the data of all ranks, with an optimizer each."""

    def __init__(self, context: Context, network: nn.Module, **options):
        super().__init__(context, "fsdp", network, **options)
        self.dtype = options.get("param_dtype") or torch.float32
        self.optimizer, self.other = self.optimizers(torch.optim.AdamW, lr=0.1)

    def backward(self, step: int) -> None:
        loss_of(self.model, step, self.rank).backward()
        self.reference_backward(step)

    def reference_backward(self, step: int) -> None:
        for rank in self.ranks:
            (self.scale * loss_of(self._reference, step, rank)).backward()

    def _reference(self, x: Tensor) -> Tensor:
        """Computes in the dtype of the wrapped network: one more rounding may change a ReLU."""
        own = {n: p.to(self.dtype) for n, p in self.reference.named_parameters()}
        return torch.func.functional_call(self.reference, own, (x,))

    def finish(self, error: float = 0.0) -> None:
        """Compares gradients; with an `error`, that of a whole one relative to its norm."""
        self.model.finish_gradient_synchronization()
        whole = self.model.whole_gradients()
        for (name, p), gradient in zip(self.reference.named_parameters(), whole, strict=True):
            assert (p.grad is None) == (gradient is None), name
            if p.grad is not None and error:
                assert (gradient - p.grad).norm() <= error * p.grad.norm(), name
            elif p.grad is not None:
                torch.testing.assert_close(gradient, p.grad, msg=lambda m, n=name: f"{n}: {m}")

    def step(self, **tolerance: float) -> None:
        self.optimizer.step()
        self.other.step()
        self.optimizer.zero_grad()
        self.other.zero_grad()
        state = self.model.state_dict()
        for name, value in self.reference.state_dict().items():
            torch.testing.assert_close(state[f"module.{name}"], value, **tolerance)


class _All:
    """Several optimizers as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("turn", [1, -1])
@on_ranks(2)
def test_two_optimizers(context: Context, turn: int) -> None:
    """They step parts of the network one after another; a forward gathers no unit twice."""
    torch.manual_seed(0)
    pair = Pair(context, Network())
    halves = []
    for model in (pair.model, pair.reference):
        own = list(model.parameters())
        halves.append([own[:7], own[7:]][::turn])  # of what is in no block each has a part
    ours = [pair.model.make_optimizer(torch.optim.AdamW, params=p, lr=0.1) for p in halves[0]]
    others = [torch.optim.AdamW(part, lr=0.1) for part in halves[1]]
    pair.optimizer, pair.other = _All(ours), _All(others)
    for step in range(3):
        pair.backward(step)
        pair.finish()
        pair.step()
    counts = []
    for _ in range(2):
        before = pair.model.step.record.collectives
        loss_of(pair.model, 9, context.rank)
        counts.append(pair.model.step.record.collectives - before)
        pair.model.free()
        before = pair.model.step.record.collectives
        pair.optimizer.step()
        counts.append(pair.model.step.record.collectives - before)
    in_all, ahead, rest, _ = counts
    assert ahead > 0
    assert ahead + rest == in_all


@on_ranks(2)
def test_two_optimizers_of_one_unit(context: Context) -> None:
    """Both step a part of it, and what the first one has gathered is not whole."""
    torch.manual_seed(0)
    pair = Pair(context, Network())
    ours, others = (list(model.parameters()) for model in (pair.model, pair.reference))
    parts = [slice(0, 3), slice(3, None)]  # of block 0 each has a part
    pair.optimizer = _All([pair.model.make_optimizer(torch.optim.AdamW, ours[p]) for p in parts])
    pair.other = _All([torch.optim.AdamW(others[p]) for p in parts])
    for step in range(3):
        pair.backward(step)
        pair.finish()
        for both in (pair.optimizer, pair.other):  # not `pair.step`, which gathers the values
            both.step()
            both.zero_grad()
    pair.backward(9)
    pair.finish()


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@on_ranks(2)
def test_accumulation_in_16_bit(context: Context, reduce: str) -> None:
    """Several backwards in a step, zeroed in both ways or not at all."""
    pair = Pair(context, Network(), reduce=reduce, param_dtype=torch.bfloat16)
    plans = [[True], [False, True], [True, True], [False, False, True], [True, False, True]]
    for step, plan in enumerate(plans):
        for part, synchronise in enumerate(plan):
            pair.model.require_backward_grad_sync = synchronise
            pair.backward(10 * step + part)
        pair.finish(error=1e-2)
        pair.finish(error=1e-2)  # does nothing
        if step == 1:
            pair.model.zero_grad(set_to_none=False)
            pair.reference.zero_grad()
        elif step != 2:
            pair.optimizer.zero_grad()
            pair.other.zero_grad()


@on_ranks(2)
def test_mixed_precision(context: Context) -> None:
    """Computes in bfloat16; slices, their gradients and what is saved are float32."""
    pair, seen = Pair(context, Network(), param_dtype=torch.bfloat16), set()
    block = pair.model.module.blocks[0]
    block.register_forward_hook(lambda _m, _x, y: seen.add(y.dtype))
    for step in range(3):
        pair.backward(step)
        pair.finish(1e-2)
        assert all(unit.gradient.dtype == torch.float32 for unit in pair.model.units)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.reference.zero_grad()
        state = pair.model.state_dict()
        pair.reference.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
    assert seen == {torch.bfloat16}
    assert all(v.dtype == torch.float32 for v in state.values())
    assert any((v != v.bfloat16()).any() for v in state.values())
    with pytest.raises(ValueError, match="param_dtype"):
        HandBuiltFSDP(Network(), process_group=context.group, param_dtype=torch.int32)


class Watched(HandBuiltFSDP):
    """Notes what starts, and which blocks are whole while another computes."""

    def __init__(self, *args, **options):
        self.events: list[tuple[str, str]] = []
        self.most = 0
        super().__init__(*args, **options)

    def note(self, what: str, block) -> None:
        self.events.append((what, block.name))
        whole = [
            b for b in self.blocks[1:] if any(u.values.untyped_storage().size() for u in b.units)
        ]
        self.most = max(self.most, len(whole))

    def enter(self, block):
        super().enter(block)
        self.note("forward", block)

    def leave(self, block, output):
        self.note("forward ends", block)
        super().leave(block, output)

    def enter_backward(self, way, place):
        super().enter_backward(way, place)
        self.note("backward", way.blocks[place])
        self.head_is_freed = not self.root.units[-1].values.untyped_storage().size()

    def start(self, units):
        if any(not u.values.untyped_storage().size() for u in units):
            self.note("gather", next(b for b in self.blocks if units[0] in b.units))
        super().start(units)

    def launch(self, unit):
        self.note("reduce", next(b for b in self.blocks if unit in b.units))
        assert len(self.schedule.in_flight) <= 1
        return super().launch(unit)


@pytest.mark.parametrize("checkpointing", [False, True])
@on_ranks(2)
def test_gathers_and_reductions_overlap(context: Context, checkpointing: bool) -> None:
    network = Network(depth=5, checkpointed=checkpointing)
    model = Watched(network, process_group=context.group)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    for step in range(3):
        model.events.clear()
        loss_of(model, step, context.rank).backward()
        model.finish_gradient_synchronization()
        assert not any(u.values.untyped_storage().size() for b in model.blocks for u in b.units)
        assert all(p.untyped_storage().size() == 4 for p in model.parameters())
        events = list(model.events)
        optimizer.step()
        optimizer.zero_grad()
    places = {event: i for i, event in reversed(list(enumerate(events)))}
    last = {event: i for i, event in enumerate(events)}
    for k in range(1, 5):
        before, block = f"blocks.{k - 1}", f"blocks.{k}"
        assert places["gather", block] < places["forward ends", before]
        assert (
            places["gather", block] > places["forward ends", f"blocks.{k - 2}"] if k > 1 else True
        )
        assert last["gather", before] < places["reduce", block], "backward is not prefetched"
        assert places["reduce", block] < places["reduce", before]
        assert places["reduce", block] <= places["backward", before]
    assert ("gather", "") not in places, "the optimizer's step has not started the root's gather"
    gathers = [name for what, name in events if what == "gather"]
    assert sorted(gathers) == sorted([f"blocks.{k}" for k in range(5)] * 2)[1:]
    assert model.most == 2
    assert model.head_is_freed, "its gradient came first, so backward needs it no more"
    assert (
        model.stats()["collectives"] == len(gathers) + 3 + 7
    )  # published; 5 blocks, 2 of no block


@on_ranks(2)
def test_a_network_is_freed_with_its_wrapper(context: Context) -> None:
    """The network goes with its wrapper, also after steps whose graphs had hooks."""
    pair = Pair(context, Network())
    for step in range(2):
        pair.backward(step)
        pair.finish()
        pair.step()
    network = weakref.ref(pair.model.module)
    del pair
    gc.collect()
    assert network() is None


@on_ranks(2)
def test_graphs_that_are_older_than_a_sum_of_16_bit_gradients(context: Context) -> None:
    """A sum of two backwards is float32; one that begins anew is of the type of its graph."""
    pair = Pair(context, Network(), param_dtype=torch.bfloat16)
    losses = [loss_of(pair.model, seed, context.rank) for seed in range(3)]
    for loss in losses[:2]:
        loss.backward()
    pair.model.finish_gradient_synchronization()
    assert all(p.grad.dtype == torch.bfloat16 for p in pair.model.parameters())
    pair.model.zero_grad()
    losses[2].backward()
    pair.reference_backward(2)
    pair.finish(error=1e-2)
