"""One cell of `experiments.llama_fsdp`: one mode at one sequence length, measured by all ranks.

Two times per step, both read from events in the stream on GPUs: forward and backward with every
exchange between ranks finished, and the complete step with noise and AdamW. A step takes as long as
on its slowest rank; memory is that of the largest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ddp_by_hand.experiments.llama_fsdp.network import (
    build,
    config_of,
    random_batch,
    without_token,
)
from ddp_by_hand.experiments.llama_fsdp.results import GridCell, GridSettings, single_result
from ddp_by_hand.experiments.training import Batch, ClassifierTraining
from ddp_by_hand.lm.ranks import watched_rank
from ddp_by_hand.lm.runtime import Hardware, Worker, launched_rank, launched_world_size
from ddp_by_hand.lm.timing import time_steps
from ddp_by_hand.lm.watch import Cause, Watch
from ddp_by_hand.measure import OK, environment, write_atomically


class LlamaTraining(ClassifierTraining):
    """A mode, ready to step, on a Llama that FSDP2 has sharded."""

    def __init__(self, cell: GridCell, settings: GridSettings, worker: Worker):
        self.config = config_of(settings.model_name)
        network = build(
            settings.model_name, self.config, worker.device, settings.seed,
            settings.train_embedding,
        )  # fmt: skip
        super().__init__(network, worker.device, settings.learning_rate)
        self.sizes = {
            "vocab_size": self.config.vocab_size,
            "parameters": sum(p.numel() for p in network.parameters()),
            "trained_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        }
        if cell.clipping_mode == "no_dp":
            return
        from dp_clipping import PrivacyEngine  # here: it takes seconds that no_dp can spare
        from dp_clipping.profiling.profile import switch_on

        # What a flash mode runs as is said once a run, by the program, and is in its results.
        logging.getLogger("dp_clipping.modes").setLevel(logging.ERROR)
        if settings.enable_profiling:
            switch_on()
        self.make_private(
            PrivacyEngine(accountant="rdp"), settings.batch_size, noise_multiplier=settings.sigma,
            max_grad_norm=settings.max_grad_norm, clipping=settings.clipping,
            norm_algorithm=settings.norm_algorithm, grad_sample_mode=cell.clipping_mode,
            expected_batch_size=settings.batch_size * worker.world_size,
        )  # fmt: skip

    @property
    def profile(self) -> Any:
        """Profile of the private model's steps; None if profiling is off."""
        return getattr(self.model, "profile", None)

    def forget_warm_up(self) -> None:
        if self.profile is not None:
            self.profile.forget()


def work(
    cell: GridCell,
    settings: GridSettings,
    hardware: Hardware,
    output: Path,
    measure: Callable[[GridCell, GridSettings, Hardware, Worker, Watch], dict] | None = None,
) -> int:
    """Runs one rank of the cell. The first rank writes the result, also that of a failure.

    `measure` is what is done there; default: what `experiments.llama_fsdp` measures.
    """
    measure = measure or _measure
    if launched_rank() == 0:
        output.unlink(missing_ok=True)

    def record(cause: Cause) -> None:
        if launched_rank() == 0 and not output.exists():
            result = single_result(
                cell, settings, hardware, launched_world_size(), status=cause.status,
                reason=f"{cause.blame}{cause.message}", environment=environment(),
            )  # fmt: skip
            write_result(output, result)

    with watched_rank(hardware, settings.timeout, record) as (worker, watch), hidden_token():
        result = measure(cell, settings, hardware, worker, watch)
        if worker.is_first:
            write_result(output, result)
    return 0


@contextmanager
def hidden_token() -> Iterator[None]:
    """Raises errors without the token, if a library has put it there."""
    try:
        yield
    except Exception as error:
        hidden = without_token(str(error))
        if hidden == str(error):
            raise
        raise RuntimeError(hidden) from None


def _measure(
    cell: GridCell, settings: GridSettings, hardware: Hardware, worker: Worker, watch: Watch
) -> dict:
    watch.at("building the model")
    training = LlamaTraining(cell, settings, worker)
    batches = make_batches(cell.seq_length, training.config.vocab_size, settings, worker)
    costs = time_steps(
        training, batches, settings.warmup_iter, worker.device, watch.at, training.forget_warm_up
    )
    return single_result(
        cell, settings, hardware, worker.world_size, status=OK, step_ms=costs.step_ms,
        forward_backward_ms=costs.backward_ms, peak_bytes=costs.peak_bytes,
        environment=environment(), profile=training.profile and training.profile.data(),
        sizes=training.sizes,
    )  # fmt: skip


def make_batches(
    length: int, vocabulary: int, settings: GridSettings, worker: Worker
) -> list[Batch]:
    """Makes random tokens [B, T] and labels [B] for each step, different on each rank."""
    generator = torch.Generator().manual_seed(1000 * settings.seed + worker.rank)
    size, steps = (settings.batch_size, length), settings.warmup_iter + settings.num_iter
    drawn = [random_batch(size, vocabulary, generator) for _ in range(steps)]
    return [(tokens.to(worker.device), labels.to(worker.device)) for tokens, labels in drawn]


def write_result(path: Path, result: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, without_token(json.dumps(result, indent=1)) + "\n")
