"""The properties of exercise 12.

Each block of the network has another number of parameters, which says what is gathered and reduced.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_by_hand.exercises.attempt import Rank, Wrong
from ddp_by_hand.exercises.expect import difference, same
from ddp_by_hand.exercises.record import Event
from ddp_by_hand.exercises.sliced import (
    expect_left_alone,
    expect_slices_only,
    expect_steps_of_units,
    expect_unit_gradients,
    network_loss,
)
from ddp_by_hand.exercises.transfer import GATHERS, SCATTERS, has_memory

WORLD_SIZES = (2,)
BLOCKS = 4
LOSS = network_loss(5)


class Block(nn.Module):
    """Two layers; a rank records when they compute, and refuses parameters that are not whole."""

    def __init__(self, k: int, rank: Rank | None):
        super().__init__()
        self.k, self.rank = k, rank
        self.up, self.down = nn.Linear(6, 5 + 2 * k), nn.Linear(5 + 2 * k, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.rank is None:
            return x + self.down(torch.tanh(self.up(x)))
        self.rank.record.mark("forward", self.k)
        expect_whole(self, self.k)
        y = self.down(torch.tanh(self.up(x)))
        if y.requires_grad:
            y.register_hook(lambda _: self.rank.record.mark("backward", self.k))
        return x + y


class Network(nn.Module):
    def __init__(self, seed: int, rank: Rank | None = None):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block(k, rank) for k in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def expect_whole(block: nn.Module, k: int) -> None:
    for name, parameter in block.named_parameters():
        if parameter.untyped_storage().size() == 0:
            raise Wrong(f"block {k} is about to compute with {name}, whose memory was freed")
        if parameter.isnan().any():
            raise Wrong(
                f"block {k} is about to compute with {name}, which is NaN: is its gather started, "
                "waited for and shown before its forward?"
            )


def wrapped(rank: Rank) -> nn.Module:
    model = rank.solution.FullyShardedDDP(Network(rank.rank, rank))
    rank.record.clear()
    return model


def step(rank: Rank, model: nn.Module, seed: int) -> None:
    with reads_of_freed_memory_refused(rank, model):
        loss = LOSS(seed)(model, rank.rank)
        rank.record.mark("end of forward")
        loss.backward()
    model.finish_gradient_synchronization()


def reads_of_freed_memory_refused(rank: Rank, model: nn.Module) -> AbstractContextManager[None]:
    """Raises `Wrong` when backward is about to read what was freed, or has not arrived.

    Reading freed memory would end the process.
    """

    def read(saved: Tensor) -> Tensor:
        if saved.untyped_storage().size():
            for k, unit in enumerate(model.blocks):
                if is_view(saved, unit.values) and saved.isnan().any():
                    raise Wrong(
                        f"backward of block {k} reads parameters whose gather has not been waited "
                        "for: wait in before_backward"
                    )
            return saved
        events = rank.record.events
        k = next((e.detail for e in reversed(events) if e.what == "backward"), None)
        if k is None:
            raise Wrong("backward reads parameters of the root, which was freed: free it in finish")
        again = gathers_of(rank, model, k, after_forward(rank))
        if not again:
            why = "gather it again in before_backward"
        elif any(e.storage.cdata == StorageWeakRef(saved.untyped_storage()).cdata for e in again):
            why = "free a block when its last gradient is there, not at an earlier one"
        else:
            why = (
                "it was gathered into a new buffer, and autograd's saved views are of the old one; "
                "keep one buffer, and resize its storage"
            )
        raise Wrong(f"backward of block {k} reads parameters that were freed: {why}")

    return saved_tensors_hooks(lambda tensor: tensor, read)


def is_view(tensor: Tensor, base: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == base.untyped_storage()._cdata


def after_forward(rank: Rank) -> list[Event]:
    events = rank.record.events
    ends = [i for i, e in enumerate(events) if e.what == "end of forward"]
    return events[ends[-1] :] if ends else []


def gathers_of(rank: Rank, model: nn.Module, k: int, events: list[Event]) -> list[Event]:
    blocks = block_of_size(rank, model)
    return [e for e in events if e.what in GATHERS and blocks.get(e.numel) == k]


def block_of_size(rank: Rank, model: nn.Module) -> dict[int, int]:
    """Returns the length of each block's flat tensor -> the block."""
    return {unit.own.numel() * rank.world_size: k for k, unit in enumerate(model.blocks)}


def whole_blocks(rank: Rank, model: nn.Module) -> dict[int, str]:
    """Returns the blocks whose parameters, or a buffer they were gathered to, are in memory."""
    whole = {}
    for k, unit in enumerate(model.blocks):
        gathered = gathers_of(rank, model, k, rank.record.events)
        if any(has_memory(e.storage) for e in gathered):
            whole[k] = "its buffer"
        if any(p.untyped_storage().size() >= p.nbytes for p in unit.trained):
            whole[k] = "its parameters"
    return whole


def forward(rank: Rank) -> None:
    """Forward computes with whole parameters, as one process does."""
    model = wrapped(rank)
    found, expected = (LOSS(1)(m, rank.rank) for m in (model, Network(0)))
    expect_left_alone(rank)
    if not same(found, expected):
        raise Wrong(difference("the loss", found, expected))


def memory_in_forward(rank: Rank) -> None:
    """In forward at most two blocks are whole, and after it none."""
    module = Network(rank.rank, rank)
    model, seen = rank.solution.FullyShardedDDP(module), []
    rank.record.clear()
    for k, block in enumerate(module.blocks):
        block.down.register_forward_pre_hook(
            lambda *_, k=k: seen.append((k, whole_blocks(rank, model)))
        )
    loss = LOSS(1)(model, rank.rank)
    for k, whole in [*seen, (BLOCKS, whole_blocks(rank, model))]:
        for other, what in whole.items():
            if other in (k, k + 1):
                continue
            when = f"while block {k} computes" if k < BLOCKS else "after forward"
            why = "free a block after its forward, and gather one ahead at most"
            if what == "its buffer":
                why = (
                    "its parameters are hidden and the buffer lives on, since autograd has saved "
                    "views of it; resize its storage to 0, and never make another one"
                )
            raise Wrong(f"block {other} is whole {when}: {why}")
    del loss


def gradients(rank: Rank) -> None:
    """After finish each own.grad is this rank's slice of the mean."""
    model = wrapped(rank)
    step(rank, model, 1)
    expect_unit_gradients(rank, model, Network(0), LOSS(1))


def what_stays(rank: Rank) -> None:
    """After finish a rank has its slices of the gradients, and nothing of the rest."""
    model = wrapped(rank)
    step(rank, model, 1)
    expect_slices_only(rank, model)


def memory_in_backward(rank: Rank) -> None:
    """In backward at most two blocks are whole, and after finish none."""
    module = Network(rank.rank, rank)
    model, seen = rank.solution.FullyShardedDDP(module), []
    rank.record.clear()
    for k, block in enumerate(module.blocks):
        block.up.register_full_backward_pre_hook(
            lambda *_, k=k: seen.append((k, whole_blocks(rank, model)))
        )
    step(rank, model, 1)
    for k, whole in [*seen, (-1, whole_blocks(rank, model))]:
        for other in whole:
            if other not in (k, k - 1):
                when = f"in the backward of block {k}" if k >= 0 else "after finish"
                raise Wrong(
                    f"block {other} is whole {when}: free a block when its last gradient is there"
                )
    if any(p.untyped_storage().size() >= p.nbytes for p in model.root.trained):
        raise Wrong("the root is whole after finish: free it there")


def prefetch(rank: Rank) -> None:
    """While a block computes, the next one is being gathered, in forward and in backward."""
    model = wrapped(rank)
    step(rank, model, 1)
    under_way, gathered = 0, set()
    following = {
        "forward": {k: k + 1 for k in range(BLOCKS - 1)},
        "backward": {k: k - 1 for k in range(1, BLOCKS)},
    }
    blocks = block_of_size(rank, model)
    for event in rank.record.events:
        if event.what == "end of forward":
            gathered.clear()
        elif event.what in GATHERS:
            gathered.add(blocks.get(event.numel))
            under_way += event.asynchronous
        elif event.what == "wait" and event.detail in GATHERS:
            under_way -= 1
        elif event.what in following and event.detail in following[event.what]:
            k = following[event.what][event.detail]
            if k not in gathered:
                raise Wrong(
                    f"{event.what} of block {event.detail} computes, and the gather of block {k} "
                    "has not been started: nothing hides it"
                )
            if not under_way:
                raise Wrong(
                    f"{event.what} of block {event.detail} waited for the gather of block {k}: "
                    "wait for it when that block begins"
                )


def traffic(rank: Rank) -> None:
    """Each block is gathered twice and reduce-scattered once, and nothing else is sent."""
    model = wrapped(rank)
    for k, unit in enumerate(model.blocks):
        unit.free = partial(marked, rank, k, unit.free)
    step(rank, model, 1)
    for event in rank.record.calls():
        if event.what not in GATHERS + SCATTERS:
            raise Wrong(
                f"{event.what} of {event.numel} numbers: only gathers of parameters and "
                "reduce-scatters of gradients are needed"
            )
    for numel, k in block_of_size(rank, model).items():
        expect_kept_once_gathered(rank, numel, k)
        calls = [e.what for e in rank.record.calls() if e.numel == numel]
        gathers, scatters = (sum(what in names for what in calls) for names in (GATHERS, SCATTERS))
        if (gathers, scatters) != (2, 1):
            raise Wrong(
                f"block {k} was gathered {gathers} times and reduced {scatters} times; twice and "
                "once will do"
            )


def marked(rank: Rank, k: int, free: Callable[[], None]) -> None:
    """Frees block k, and records that."""
    rank.record.mark("free", k)
    free()


def expect_kept_once_gathered(rank: Rank, numel: int, k: int) -> None:
    """Raises `Wrong` if block k, of so many numbers, was freed between its gather and its use."""
    ahead, freed_by, at = False, None, None
    for event in rank.record.events:
        if event.what in ("forward", "backward"):
            at = f"{event.what} of block {event.detail}"
            if event.detail == k:
                ahead, freed_by = False, None
        elif event.what == "end of forward":
            ahead, freed_by = False, None
        elif event.what == "free" and event.detail == k and ahead:
            freed_by = at
        elif event.what in GATHERS and event.numel == numel:
            if freed_by is not None:
                raise Wrong(
                    f"block {k} was gathered ahead, freed in the {freed_by}, and gathered again: "
                    f"free a block after its own forward and backward only"
                )
            ahead = True


def early(rank: Rank) -> None:
    """A block's gradients are on the wire when the backward of the block before it begins."""
    model = wrapped(rank)
    step(rank, model, 1)
    started, waits, blocks = set(), 0, block_of_size(rank, model)
    for event in rank.record.events:
        if event.what in SCATTERS:
            started.add(blocks.get(event.numel))
            if not event.asynchronous:
                raise Wrong("a reduce-scatter without async_op=True holds up the backward pass")
        elif event.what == "backward" and {event.detail + 1} & set(blocks.values()) - started:
            raise Wrong(
                f"backward of block {event.detail} begins, and the gradients of block "
                f"{event.detail + 1} are complete and not on the wire: start in gradient_ready"
            )
        elif event.what == "backward" and started and waits == len(started):
            raise Wrong(
                f"backward of block {event.detail} begins, and the gradients of block "
                f"{event.detail + 1} were waited for where they were started: wait in finish"
            )
        elif event.what == "wait" and event.detail in SCATTERS:
            waits += 1


def later_steps(rank: Rank) -> None:
    """Three steps of an optimizer are those of one process."""
    question = "does every forward gather anew what was stepped?"
    expect_steps_of_units(rank, wrapped(rank), Network(0), LOSS, step, question)


PROPERTIES = [
    forward,
    memory_in_forward,
    gradients,
    what_stays,
    memory_in_backward,
    prefetch,
    traffic,
    early,
    later_steps,
]
