"""The correctness gate: checks every implementation's gradients before anything is timed.

Data-parallel training is right when W ranks with a shard each get the gradient that one process
gets from the whole batch. So each rank also computes that gradient alone, in float32, and compares.
`none` does not communicate, and is compared with the rank's own shard. `diloco` reduces no gradient
either: ddp_by_hand/bench/rounds.py compares its parameters.

A private gradient, without its noise, is compared with one process that clips sequence by sequence
and adds up. In the second step the threshold is the median of the first step's norms, so that
about half of the sequences are clipped, whatever threshold the user has chosen.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_by_hand.bench.parts import Batch
from ddp_by_hand.bench.rounds import EVERY, ROUNDS, expected_moves, moves
from ddp_by_hand.bench.settings import (
    Settings,
    Subject,
    batches_for,
    has_rounds,
    mode_and_algorithm,
)
from ddp_by_hand.bench.training import assemble, build_network
from ddp_by_hand.lm.gradients import gradient_error
from ddp_by_hand.lm.layout import whole
from ddp_by_hand.lm.model import forward_loss
from ddp_by_hand.lm.runtime import Worker
from ddp_by_hand.lm.timing import release_memory
from dp_clipping.clipping.norms import GRAM_ROUNDING

TOLERANCE = 1e-4  # float32 sums in another order differ by about 1e-6; a wrong one by far more
STEPS = 2  # the second step uses rebuilt buckets and cleared gradients
FLOOR = "none"

Gradients = list[Tensor]


def tolerance(subject: Subject, settings: Settings) -> float:
    """Returns the relative error above which a gradient is wrong.

    A norm from Gram matrices is increased by an allowance for their rounding: GRAM_ROUNDING times
    (Σ_t ‖a_t‖‖y_t‖)², which is T ‖G‖² where tokens neither cancel nor agree. The clipped gradient
    is smaller by half of that.
    """
    if mode_and_algorithm(subject.clipping)[1] != "width":
        return TOLERANCE
    return TOLERANCE + GRAM_ROUNDING * settings.model.context_length


@dataclass(frozen=True)
class Reference:
    """Expected gradients of each step and, for private steps, the thresholds that clipped them.

    whole  of the global batch
    own    of this rank's batch, as `none` trains on it
    """

    whole: list[Gradients]
    own: list[Gradients]
    limits: list[float] | None = None


class Worst(NamedTuple):
    """The gradient with the largest error. Ranks compare these, so the error comes first.

    ratio  its norm over that of the right one
    what   it is, if it is no gradient
    """

    error: float
    rank: int
    step: int
    parameter: str
    ratio: float
    what: str = "gradient"

    def describe(self) -> str:
        return (
            f"{self.what} of {self.parameter} on rank {self.rank} in step {self.step}: relative "
            f"error {self.error:.1e}, its norm is {self.ratio:.3g} x the right one"
        )


class Gate:
    """Compares with gradients that this process computes alone, in float32.

    `note` is called with its progress.
    """

    def __init__(self, settings: Settings, worker: Worker, note: Callable[[str], None]):
        self._settings, self._worker, self._note = settings, worker, note
        self._reference: Reference | None = None  # one at a time: it is large
        self._kind: tuple[bool, int] | None = None  # private? how many batches?

    def error(self, subject: Subject) -> Worst:
        """Returns the largest relative error of a gradient over parameters, steps and ranks."""
        found = (
            self._round_errors(subject)
            if has_rounds(subject.implementation)
            else (self._gradient_errors(subject))
        )
        release_memory(self._worker.device)
        self._note(f"{subject.label} (gate), comparison")
        everyone: list[list[Worst]] = [[] for _ in range(self._worker.world_size)]
        dist.all_gather_object(everyone, found)
        return max((one for own in everyone for one in own), key=lambda one: one.error)

    def _round_errors(self, subject: Subject) -> list[Worst]:
        worker, ranks = self._worker, self._worker.world_size

        def batch(step: int, rank: int) -> Batch:
            self._note(f"{subject.label} (gate), step {step}, batch of rank {rank}")
            return self._batch(step, rank, ranks)

        moved = moves(self._settings, worker, subject, batch)
        network = build_network(self._settings, worker.device, "float32").double()
        names = [name for name, _ in network.named_parameters()]
        expected = expected_moves(network, ranks, batch)
        error, number, ratio = gradient_error(moved, expected)
        step = EVERY * ROUNDS - 1
        return [Worst(error, worker.rank, step, names[number], ratio, "change of two rounds")]

    def _gradient_errors(self, subject: Subject) -> list[Worst]:
        reference = self._reference_for(subject)
        expected = reference.own if subject.implementation == FLOOR else reference.whole
        network = build_network(self._settings, self._worker.device, "float32", subject.layout)
        world_size = self._worker.world_size
        place = subject.layout.data_place(self._worker.rank, world_size)
        names = [name for name, _ in network.named_parameters()]
        self._note(f"{subject.label} (gate), construction")
        parts = assemble(subject, network, self._settings, world_size, noise_multiplier=0.0)
        found = []
        for step in range(STEPS):
            self._note(f"{subject.label} (gate), step {step}")
            if reference.limits is not None:
                parts.optimizer.max_grad_norm = reference.limits[step]
            parts.forward_loss(self._batch(step, *place)).backward()
            parts.finish()
            for work in parts.more_phases.values():
                work()
            error, number, ratio = gradient_error(
                gradients_of(network, parts.model), expected[step]
            )
            found.append(Worst(error, self._worker.rank, step, names[number], ratio))
            parts.optimizer.zero_grad(set_to_none=True)
        return found

    def _reference_for(self, subject: Subject) -> Reference:
        data_rank, data_ranks = subject.layout.data_place(
            self._worker.rank, self._worker.world_size
        )
        kind = (subject.is_private, data_ranks)
        if self._reference is None or self._kind != kind:
            self._reference = None
            network = build_network(self._settings, self._worker.device, "float32")
            make = self._private_reference if subject.is_private else self._ordinary_reference
            self._reference, self._kind = make(network, data_rank, data_ranks), kind
            del network
            release_memory(self._worker.device)
        return self._reference

    def _ordinary_reference(self, network: nn.Module, data_rank: int, data_ranks: int) -> Reference:
        def gradients(step: int, ranks: range | list[int]) -> Gradients:
            for batch in self._batches(step, ranks, data_ranks):
                (forward_loss(network, batch) / len(ranks)).backward()
            found = gradients_of(network)
            network.zero_grad(set_to_none=True)
            return found

        everyone, own = range(data_ranks), [data_rank]
        return Reference(
            whole=[gradients(step, everyone) for step in range(STEPS)],
            own=[gradients(step, own) for step in range(STEPS)],
        )

    def _private_reference(self, network: nn.Module, data_rank: int, data_ranks: int) -> Reference:
        """Computes clipped sums one sample at a time.

        One gradient is in memory at a time, and no batched code is involved.
        """
        from ddp_by_hand.bench.private import private_parts

        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        parts = private_parts("per_sample", network, optimizer, self._settings, data_ranks, 0.0)

        def gradients(step: int, ranks: Iterable[int]) -> tuple[Gradients, Tensor]:
            for inputs, targets in self._batches(step, ranks, data_ranks):
                for sequence in zip(inputs.split(1), targets.split(1), strict=True):
                    parts.forward_loss(sequence).backward()
            norms = parts.model.per_sample_gradient_norms
            for work in parts.more_phases.values():
                work()
            found = gradients_of(network)
            parts.optimizer.zero_grad(set_to_none=True)
            return found, norms

        limits, whole, own = [self._settings.privacy.max_grad_norm], [], []
        for step in range(STEPS):
            parts.optimizer.max_grad_norm = limits[step]
            found, norms = gradients(step, range(data_ranks))
            whole.append(found)
            own.append(gradients(step, [data_rank])[0])
            limits.append(norms.median().item())
        return Reference(whole, own, limits)

    def _batches(self, step: int, ranks: Iterable[int], data_ranks: int) -> Iterator[Batch]:
        for rank in ranks:
            self._note(f"reference gradients (gate), step {step}, batch of rank {rank}")
            yield self._batch(step, rank, data_ranks)

    def _batch(self, step: int, data_rank: int, data_ranks: int) -> Batch:
        batches = batches_for(self._settings, data_rank, data_ranks)
        inputs, targets = batches(step)
        return inputs.to(self._worker.device), targets.to(self._worker.device)


def gradients_of(network: nn.Module, wrapper: nn.Module | None = None) -> list[Tensor]:
    """Returns whole copies of all gradients, zeros where a parameter has none.

    So a missing gradient is an error. A wrapper that shards gradients gathers them.
    """
    gather = getattr(wrapper, "whole_gradients", None)
    gradients = gather() if gather is not None else [p.grad for p in network.parameters()]
    return [
        whole((torch.zeros_like(p) if gradient is None else gradient).detach()).clone()
        for p, gradient in zip(network.parameters(), gradients, strict=True)
    ]
