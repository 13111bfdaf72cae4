"""Build one implementation, train it for some epochs, take it down again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp import implementation, options_of, wrap
from ddp_by_hand.bench.names import options_in, plain
from ddp_by_hand.bench.parts import Batch, StepParts, clipping_of, make_optimizer
from ddp_by_hand.bench.settings import Settings, Subject, batches_for
from ddp_by_hand.bench.sharded import REPLICATED, shard
from ddp_by_hand.lm.layout import Layout
from ddp_by_hand.lm.model import Transformer, forward_loss
from ddp_by_hand.lm.runtime import Worker, seed_everything
from ddp_by_hand.lm.schedule import MAX_WARMUP_GRADIENT_NORM, in_warmup, learning_rate
from ddp_by_hand.lm.timing import StepClock, release_memory
from ddp_by_hand.lm.training import training_step
from ddp_by_hand.lm.watch import Watch
from ddp_by_hand.tracing import phase

Phase = Callable[[str], AbstractContextManager]


@dataclass
class TrainingRun:
    """One implementation in training on this rank; batches are on the device already."""

    parts: StepParts
    batches: list[Batch]
    settings: Settings
    device: torch.device

    @property
    def model(self) -> nn.Module:
        return self.parts.model

    def step(self, number: int, phase: Phase) -> Tensor:
        warmup = self.settings.warmup_steps
        return training_step(
            self.batches[number],
            self.parts.optimizer,
            forward_loss=self.forward_loss,
            finish=self.parts.finish,
            learning_rate=learning_rate(number, warmup),
            more_phases=self.parts.more_phases,
            max_gradient_norm=MAX_WARMUP_GRADIENT_NORM if in_warmup(number, warmup) else None,
            clip_gradients=self.parts.clip_gradients,
            phase=phase,
        )

    def forward_loss(self, batch: Batch) -> Tensor:
        with arithmetic(self.settings.dtype, self.device):
            return self.parts.forward_loss(batch)


def arithmetic(dtype: str, device: torch.device) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if dtype == "mixed" else nullcontext()


def build_network(
    settings: Settings, device: torch.device, dtype: str, layout: Layout = REPLICATED
) -> nn.Module:
    """Builds the network: the same parameters for a seed, on every rank and implementation.

    A sharded network is never whole in memory.
    """
    is_sharded = layout is not REPLICATED
    with torch.device("meta" if is_sharded else device):
        network = Transformer(settings.model)
    if is_sharded:
        shard(network, layout, dist.get_world_size(), device.type)
    seed_everything(settings.seed)
    if is_sharded:
        from ddp_by_hand.lm.parallel import materialize

        materialize(network, device)
    else:
        network.reset_parameters()
    network.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    if settings.compile:
        for block in network.blocks:
            block.compile()
    return network


def assemble(
    subject: Subject,
    network: nn.Module,
    settings: Settings,
    world_size: int,
    noise_multiplier: float | None = None,
    param_dtype: torch.dtype | None = None,
) -> StepParts:
    """Assembles a subject's step.

    Args:
        noise_multiplier: overrides that of the settings.
        param_dtype: of a variant that has this option.
    """
    is_sharded = subject.layout is not REPLICATED
    model = network
    if not is_sharded:
        sizes = {
            "bucket_size_mb": settings.bucket_size_mb,
            "param_dtype": param_dtype,
            "every": settings.local_steps(subject),
        }
        model = wrap_network(subject.implementation, network, sizes)
    optimizer = make_optimizer(model, lr=0.0, fused=True)
    if subject.is_private:
        from ddp_by_hand.bench.private import (
            private_parts,  # Opacus underneath takes two seconds to import
        )

        return private_parts(
            subject.clipping, model, optimizer, settings,
            subject.layout.sizes(world_size)[0], noise_multiplier,
        )  # fmt: skip
    return StepParts(
        model=model,
        optimizer=optimizer,
        forward_loss=partial(forward_loss, model),
        # A sharded network's backward has sent, and waited for, what belongs to it.
        finish=(lambda: None) if is_sharded else model.finish_gradient_synchronization,
        more_phases={},
        clip_gradients=clipping_of(model),
    )


def wrap_network(name: str, network: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Wraps the network, with those options that are set and that the variant has."""
    known = options_of(implementation(plain(name)))
    given = {key: value for key, value in options.items() if value is not None and key in known}
    return wrap(plain(name), network, **given, **dict.fromkeys(options_in(name), True))


def gathered_dtype(subject: Subject, dtype: str) -> torch.dtype | None:
    """Returns bfloat16 if the run computes in it and the variant keeps float32 slices beside it.

    The network is then built in float32.
    """
    if dtype == "float32" or subject.is_private or subject.layout is not REPLICATED:
        return None
    takes_it = "param_dtype" in options_of(implementation(plain(subject.implementation)))
    return torch.bfloat16 if takes_it else None


@contextmanager
def building(settings: Settings, subject: Subject, worker: Worker) -> Iterator[TrainingRun]:
    """Yields a training run of `subject`, and frees its memory afterwards."""
    param_dtype = gathered_dtype(subject, settings.dtype)
    dtype = settings.dtype if param_dtype is None else "float32"
    network = build_network(settings, worker.device, dtype, subject.layout)
    batches = batches_for(settings, *subject.layout.data_place(worker.rank, worker.world_size))
    run = TrainingRun(
        parts=assemble(subject, network, settings, worker.world_size, param_dtype=param_dtype),
        batches=[
            tuple(tokens.to(worker.device) for tokens in batches(step))
            for step in range(settings.num_steps)
        ],
        settings=settings,
        device=worker.device,
    )
    del network
    try:
        yield run
    finally:
        del run
        release_memory(worker.device)


def train(run: TrainingRun, clock: StepClock, step_phase: Callable[[int], Phase]) -> Tensor:
    """Trains all epochs and labels each with its kind and learning rates. Returns the last loss."""
    settings, loss = run.settings, torch.zeros(())
    clock.mark()
    for epoch in range(settings.num_epochs):
        first = epoch * settings.steps_per_epoch
        with phase(epoch_name(settings, epoch)):
            for number in range(first, first + settings.steps_per_epoch):
                loss = run.step(number, step_phase(number))
                clock.mark()
    return loss


def noted_phases(watch: Watch, label: str) -> Callable[[int], Phase]:
    """Returns a function: step number -> labels of phases, each noted by the watch."""

    def of_step(number: int) -> Phase:
        @contextmanager
        def noted(name: str) -> Iterator[None]:
            watch.at(f"{label}, step {number}, {name}")
            with phase(name):
                yield

        return noted

    return of_step


def epoch_name(settings: Settings, epoch: int) -> str:
    """Names an epoch: `epoch_0_warmup_lr_0_to_0.00083`, `epoch_1_training_lr_0.001`."""
    first, warmup = epoch * settings.steps_per_epoch, settings.warmup_steps
    low = learning_rate(first, warmup)
    high = learning_rate(first + settings.steps_per_epoch - 1, warmup)
    kind = "warmup" if in_warmup(first, warmup) else "training"
    return f"epoch_{epoch}_{kind}_lr_{low:.2g}" + (f"_to_{high:.2g}" if high != low else "")
