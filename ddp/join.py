"""Lets ranks train on different numbers of batches: `with model.join():`.

Every step is a series of collective calls, so a rank without a batch must call them too. In the
block a rank tells the others, before each of its collective acts, what it is about to do. A rank
whose block has ended says so, and then follows the acts of the others: it reduces zeros where they
reduce gradients, and runs no forward and no backward of its own. Means stay means over all ranks.
"""

import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp.internals.gradients import Gradients
from ddp.internals.ownership import activate
from ddp.internals.replicas import Replicas
from ddp.internals.step import Step
from ddp.internals.unused import tensors_in
from ddp.schedule import Schedule
from ddp.torch_compat import gather_on_hosts, gloo_beside

STATUS_BYTES = 400  # of a message to other ranks

FORWARD = "a training forward"
UNDER_NO_SYNC = "a training forward under no_sync()"
CLIP = "clip_grad_norm_ "
STEP = "optimizer.step() of optimizer "
END = "the end of model.join()"

NESTED = "model.join() inside of model.join(): leave out the inner one"
PRIVATE = (
    "model.join() with a private engine, whose sampler gives every rank as many steps: leave it out"
)
UNFINISHED = (
    "a step in model.join() is not finished on rank {rank}: behind each forward call backward() "
    "and finish_gradient_synchronization(), before the next forward and before the end; add up "
    "gradients of several batches under no_sync()"
)
KEPT = (
    "in model.join() gradients are added to reduced ones, of which a rank that has ended has no "
    "part: call optimizer.zero_grad() before each step, and add up gradients of several batches "
    "under no_sync()"
)
NOT_THE_SAME = (
    "the ranks do different things in model.join(): {acts}. Take the same acts on all ranks that "
    "have a batch; evaluate and save behind the block"
)
UNKNOWN = (
    "{what} that rank {rank} does not know, whose batches have ended: build every optimizer by "
    "model.make_optimizer(cls, lr=...)"
)


class Joined:
    """The state of one rank inside of a block.

    Attributes:
        active: the ranks that took part in the last act with data.
        follows: this rank has ended, and follows the others.
        is_new: no gradient of a new step has arrived.
        synchronised: the last training forward was the last one of its step.
    """

    def __init__(self, world_size: int):
        self.active = list(range(world_size))
        self.follows, self.is_new, self.synchronised = False, True, False


class Joinable:
    """The method `join` of a wrapper, and how a rank without batches follows the others."""

    module: nn.Module
    training: bool
    is_whole: bool = False
    world_size: int
    process_group: dist.ProcessGroup
    gradients: Gradients
    replicas: Replicas
    schedule: Schedule
    step: Step
    made: tuple[weakref.ref[Optimizer], ...]
    find_unused_parameters: bool
    require_backward_grad_sync: bool
    gradients_come_by_hand: bool
    joined: Joined | None = None

    always_gathers: ClassVar[bool] = False
    """Whether a forward under no_sync() is collective."""

    @contextmanager
    def join(self) -> Iterator[None]:
        """Enters a context in which ranks may take different numbers of steps.

        Enter it on all ranks, around the loop over batches. A rank that has left the loop
        contributes zero to the steps of the others. The mean is over all ranks, as with PyTorch's
        `DistributedDataParallel.join()`. At the end all ranks have the same parameters, buffers
        and optimizer state.

        Raises:
            RuntimeError: on all ranks, if those with data do different things, or a step is not
                finished.
        """
        if self.joined is not None:
            raise RuntimeError(NESTED)
        if self.gradients_come_by_hand:
            raise RuntimeError(PRIVATE)
        if self.world_size == 1:
            yield
            return
        gloo_beside(self.process_group)
        self.joined = Joined(self.world_size)
        with ExitStack() as stack:
            stack.callback(self._leave_join)
            for handle in (
                self.register_forward_pre_hook(self._before_joined_forward, prepend=True),  # type: ignore[attr-defined]
                self.register_forward_hook(self._after_joined_forward),  # type: ignore[attr-defined]
                register_optimizer_step_post_hook(self._note_optimizer),
            ):
                stack.callback(handle.remove)
            yield
            self._follow_to_the_end()  # not behind an error: the others' timeout tells of it

    def exchange(
        self, status: str, wait: Callable[[dist.Work], object] = methodcaller("wait")
    ) -> list[str]:
        """Returns the status of every rank, or its first bytes; a collective call.

        It waits for other hosts, and for no GPU: a host that did would have nothing queued behind
        the last reduction, and the GPU would be idle while the optimizer's kernels are launched.
        """
        if self.world_size == 1:
            return [status]
        own = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
        if text := status.encode()[:STATUS_BYTES]:
            own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        everyone = own.new_empty(self.world_size, STATUS_BYTES)
        wait(gather_on_hosts(everyone, own, self.process_group))
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyone.tolist()]

    def announce(self, act: str, problem: str = "") -> bool:
        """Tells the others, in a block, what this rank does; returns whether one has ended."""
        if self.joined is None or self.joined.follows:
            return False
        self._exchange_acts(act, problem)
        return len(self.joined.active) < self.world_size

    def announce_step(self, optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
        """Tells the others of a collective step, with the settings of its groups."""
        if self.joined is None or self.joined.follows:
            return
        number = self._number_of(optimizer)
        rank = dist.get_rank(self.process_group)
        problem = "" if number is not None else UNKNOWN.format(what="an optimizer", rank=rank)
        if self.announce(f"{STEP}{number}", problem):
            self._from_source(settings)

    # ---- a rank that has data ------------------------------------------------------------------

    def _before_joined_forward(self, *_arguments: Any) -> None:
        joined = self.joined
        trains = self.training and torch.is_grad_enabled() and not self.is_whole
        if joined is None or not trains:
            return
        joined.is_new |= joined.synchronised
        joined.synchronised = self.require_backward_grad_sync
        if joined.synchronised or self.always_gathers:
            act = FORWARD if joined.synchronised else UNDER_NO_SYNC
            self.announce(act, self._unfinished())

    def _after_joined_forward(self, _module: nn.Module, _arguments: tuple, output: Any) -> None:
        if self.training and torch.is_grad_enabled():
            for x in tensors_in(output):
                if x.requires_grad:
                    x.register_hook(self._refuse_kept)

    def _refuse_kept(self, _gradient: Tensor) -> None:
        """Called when backward begins: code may clear gradients between forward and backward."""
        if self.joined is not None and self.joined.is_new:
            self.joined.is_new = False
            gradients = [p.grad for p in self.gradients.parameters]
            if any(g is not None and bool(g.any()) for g in gradients):
                raise RuntimeError(KEPT)

    def _unfinished(self) -> str:
        rank = dist.get_rank(self.process_group)
        return UNFINISHED.format(rank=rank) if self.step.unfinished else ""

    def _exchange_acts(self, mine: str, problem: str) -> str:
        """Returns what the ranks do that have not ended; `END` if there is none."""
        assert self.joined is not None
        told = [status.partition("\n")[::2] for status in self.exchange(f"{mine}\n{problem}")]
        acts: dict[str, int] = {}
        for rank, (act, _) in enumerate(told):
            acts.setdefault(act, rank)
        if set(acts) == {END}:
            return END
        if problem := next((text for _, text in told if text), ""):
            raise RuntimeError(problem)
        others = [act for act in acts if act != END]
        is_known = others[0].startswith((FORWARD, CLIP, STEP))
        if len(others) > 1 or not is_known:
            listed = ", ".join(f"{act} on rank {rank}" for act, rank in acts.items())
            raise RuntimeError(NOT_THE_SAME.format(acts=listed))
        self.joined.active = [rank for rank, (act, _) in enumerate(told) if act != END]
        self.replicas.source = self.joined.active[0]
        return others[0]

    # ---- a rank that has ended -----------------------------------------------------------------

    def obstacle_to_following(self) -> str:
        """Returns why this rank cannot follow the others; "" if it can."""
        return self._unfinished()

    def _follow_to_the_end(self) -> None:
        assert self.joined is not None
        joined, problem = self.joined, self.obstacle_to_following()
        joined.is_new = True
        while (act := self._exchange_acts(END, problem)) != END:
            joined.follows = True
            if act in (FORWARD, UNDER_NO_SYNC):
                self._reduce_zeros(act == FORWARD)
            elif act.startswith(CLIP):
                self.clip_grad_norm_(float(act.removeprefix(CLIP)))  # type: ignore[attr-defined]
            else:
                self._step_with_others(int(act.removeprefix(STEP)))
        if joined.follows:
            self.module.zero_grad()  # a loop may do so at the end of a step
        if len(joined.active) < self.world_size:
            self.take_last_values()

    def _reduce_zeros(self, synchronises: bool) -> None:
        """Makes the calls of a step in which this rank has no gradient."""
        assert self.joined is not None
        activate(self)  # type: ignore[arg-type]
        if self.joined.is_new:
            self.module.zero_grad()
        self.joined.is_new = synchronises
        self.follow_forward(synchronises)
        if synchronises:
            self.step.unfinished = True
            if not self.find_unused_parameters:
                for i in self.schedule.order:
                    self.step.arrive(self, i)  # type: ignore[arg-type]
            with torch.no_grad():
                self.launch_buckets(everything=True)  # type: ignore[attr-defined]
        self.follow_backward()
        if synchronises:
            self.finish_gradient_synchronization()  # type: ignore[attr-defined]

    def follow_forward(self, synchronises: bool) -> None:
        """Makes the calls of a training forward."""
        self.before_forward()  # type: ignore[attr-defined]
        self.replicas.broadcast_buffers()

    def follow_backward(self) -> None:
        """Makes those calls of a backward that reduce nothing, once all buckets are launched."""

    def _step_with_others(self, number: int) -> None:
        optimizer = self._optimizer(number)
        for group, theirs in zip(optimizer.param_groups, self._from_source(None), strict=True):
            group.update(theirs)
        optimizer.step()

    def take_last_values(self) -> None:
        """Gives ranks that ended early what those have that took the last step."""
        assert self.joined is not None
        self.replicas.broadcast_everything()
        has_ended = dist.get_rank(self.process_group) not in self.joined.active
        alive = {i: made for i, ref in enumerate(self.made) if (made := ref()) is not None}
        states = self._from_source({i: optimizer.state_dict() for i, optimizer in alive.items()})
        for number, state in states.items() if has_ended else ():
            self._optimizer(number).load_state_dict(state)

    # ---- optimizers ----------------------------------------------------------------------------

    def _note_optimizer(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Notes an optimizer of this network that `make_optimizer` has not made."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        if self._number_of(optimizer) is None and any(p in self.gradients.index for p in held):
            self.made = (*self.made, weakref.ref(optimizer))

    def _number_of(self, optimizer: Optimizer) -> int | None:
        return next((i for i, made in enumerate(self.made) if made() is optimizer), None)

    def _optimizer(self, number: int) -> Optimizer:
        optimizer = self.made[number]() if number < len(self.made) else None
        if optimizer is None:
            rank = dist.get_rank(self.process_group)
            raise RuntimeError(UNKNOWN.format(what=f"optimizer {number}", rank=rank))
        return optimizer

    def _from_source(self, value: Any) -> Any:
        """Returns the value of the first rank that has data, with its tensors on the CPU."""
        message: list[Any] = [None]
        source = self.replicas.source
        if dist.get_rank(self.process_group) == source:
            torch.save(value, file := io.BytesIO())
            message = [file.getvalue()]
        dist.broadcast_object_list(message, group=self.process_group, group_src=source)
        return torch.load(io.BytesIO(message[0]), map_location="cpu", weights_only=False)

    def _leave_join(self) -> None:
        self.joined, self.replicas.source = None, 0
