"""One cell of `experiments.llama_fsdp`: one mode at one sequence length, measured by all ranks.

Two times a step, both read from events in the stream on GPUs: forward and backward with every
exchange between ranks finished, and the complete step with noise and AdamW. A step takes as long as
on its slowest rank; memory is that of the largest.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.llama_fsdp.network import LABELS, PAD, build, config_of, without_token
from experiments.llama_fsdp.results import Cell, Settings, single_result
from lm.launch import INTERRUPTED
from lm.runtime import Hardware, PeakMemory, StepClock, Worker, connect_store, process_group
from lm.watch import Cause, Watch
from measure import OK, environment, write_atomically

Batch = tuple[Tensor, Tensor]


class Run:
    """A mode, ready to step."""

    def __init__(self, cell: Cell, settings: Settings, worker: Worker):
        self.config = config_of(settings.model_name)
        network = build(
            settings.model_name, self.config, worker.device, settings.seed,
            settings.train_embedding,
        )  # fmt: skip
        self.parameters = sum(p.numel() for p in network.parameters())
        trained = [p for p in network.parameters() if p.requires_grad]
        self.trained = sum(p.numel() for p in trained)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            trained, lr=settings.learning_rate, fused=worker.device.type == "cuda"
        )
        self.model: nn.Module = network
        self.criterion: Callable[[Tensor, Tensor], Tensor] = nn.CrossEntropyLoss()
        self._finish: Callable[[], None] = lambda: None  # backward waits for FSDP's own exchange
        if cell.clipping_mode != "no_dp":
            self._make_private(cell, settings, worker)

    def _make_private(self, cell: Cell, settings: Settings, worker: Worker) -> None:
        from dp_clipping import PrivacyEngine  # here: it takes seconds that no_dp can spare
        from dp_clipping.profiling.profile import switch_on

        # What a flash mode runs as is said once a run, by the program, and is in its results.
        logging.getLogger("dp_clipping.modes").setLevel(logging.ERROR)
        if settings.enable_profiling:
            switch_on()
        data = TensorDataset(torch.zeros(64 * settings.batch_size, 1))
        with warnings.catch_warnings():
            # Batches of fixed size are compared: nothing is published, and no ε is stated.
            warnings.filterwarnings("ignore", message="poisson_sampling=False")
            model, self.optimizer, self.criterion, _ = PrivacyEngine(
                accountant="rdp"
            ).make_private(
                module=self.model, optimizer=self.optimizer, criterion=self.criterion,
                data_loader=DataLoader(data, batch_size=settings.batch_size),
                noise_multiplier=settings.sigma, max_grad_norm=settings.max_grad_norm,
                poisson_sampling=False, clipping=settings.clipping,
                norm_algorithm=settings.norm_algorithm,
                expected_batch_size=settings.batch_size * worker.world_size,
                grad_sample_mode=cell.clipping_mode,
            )  # fmt: skip
        model.skip_checks()  # they would be in some of the few steps that are timed
        self.model, self._finish = model, model.finish_synchronization

    def backward(self, batch: Batch) -> None:
        """The exchange of sums included."""
        tokens, labels = batch
        self.criterion(self.model(input_ids=tokens).logits, labels).backward()
        self._finish()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def profile(self) -> Any:
        """Of the private model's steps; None: profiling is off."""
        return getattr(self.model, "profile", None)


def work(
    cell: Cell,
    settings: Settings,
    hardware: Hardware,
    output: Path,
    measure: Callable[[Cell, Settings, Hardware, Worker, Watch], dict] | None = None,
) -> int:
    """One rank of the cell; the first writes the result, also that of a failure.

    `measure` is what is done there; default: what `experiments.llama_fsdp` measures.
    """
    measure = measure or _measure
    with process_group(hardware, settings.timeout_s) as worker:
        if worker.is_first:
            output.unlink(missing_ok=True)

        def record(cause: Cause) -> None:
            if worker.is_first and not output.exists():
                result = single_result(
                    cell, settings, hardware, worker.world_size, status=cause.status,
                    reason=f"{cause.blame}{cause.message}", environment=environment(),
                )  # fmt: skip
                write_result(output, result)

        store = connect_store(timedelta(seconds=settings.timeout_s))
        watch = Watch(store, worker.rank, worker.world_size, settings.timeout_s, record)
        try:
            result = measure(cell, settings, hardware, worker, watch)
            if worker.is_first:
                write_result(output, result)
            dist.barrier()  # nobody leaves, and falls silent, while others work
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)  # the others may be gone: an orderly end is not possible
        except Exception as error:
            hidden = without_token(str(error))
            watch.fail(error if hidden == str(error) else RuntimeError(hidden))
        watch.close()
        dist.barrier()  # the first rank may host the store, which the other watches use
    return 0


def _measure(
    cell: Cell, settings: Settings, hardware: Hardware, worker: Worker, watch: Watch
) -> dict:
    watch.at("building the model")
    run = Run(cell, settings, worker)
    batches = make_batches(cell.seq_length, run.config.vocab_size, settings, worker)
    steps, parts, peak = time_steps(run, batches, settings.warmup_iter, worker, watch)
    return single_result(
        cell, settings, hardware, worker.world_size, status=OK, step_ms=steps,
        forward_backward_ms=parts, peak_bytes=peak, vocab_size=run.config.vocab_size,
        parameters=run.parameters, trained_parameters=run.trained, environment=environment(),
        profile=None if run.profile is None else run.profile.data(),
    )  # fmt: skip


def time_steps(
    run: Run, batches: list[Batch], warm_up: int, worker: Worker, watch: Watch
) -> tuple[list[float], list[float], float | None]:
    """Of the steps after the warm-up: complete and without noise and AdamW, in milliseconds on the
    slowest rank; the peak of allocated memory in bytes on the largest, None where it is unknown."""
    for number, batch in enumerate(batches[:warm_up]):
        watch.at(f"warm-up step {number + 1}")
        run.backward(batch)
        run.step()
    # A first step leaves gradients in cycles of FSDP2's objects, in any mode (seen with torch
    # 2.11), and it is by chance when Python finds them.
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if run.profile is not None:
        run.profile.forget()  # the warm-up
    clock, memory = StepClock(worker.device), PeakMemory(worker.device)
    clock.mark()
    for number, batch in enumerate(batches[warm_up:]):
        watch.at(f"step {number + 1}")
        run.backward(batch)
        clock.mark()
        run.step()
        clock.mark()
    marks = clock.milliseconds()
    parts, rest = _slowest(marks[0::2], worker), marks[1::2]
    steps = _slowest([a + b for a, b in zip(marks[0::2], rest, strict=True)], worker)
    peak = _slowest([float(memory.bytes() or 0)], worker)[0]
    return steps, parts, peak or None


def make_batches(length: int, vocabulary: int, settings: Settings, worker: Worker) -> list[Batch]:
    """Random tokens [B, T] and labels [B] for each step, others on each rank."""
    generator = torch.Generator().manual_seed(1000 * settings.seed + worker.rank)
    found = []
    for _ in range(settings.warmup_iter + settings.num_iter):
        size = (settings.batch_size, length)
        tokens = torch.randint(PAD + 1, vocabulary, size, generator=generator)
        labels = torch.randint(0, LABELS, size[:1], generator=generator)
        found.append((tokens.to(worker.device), labels.to(worker.device)))
    return found


def _slowest(values: list[float], worker: Worker) -> list[float]:
    """Each value's maximum over the ranks."""
    x = torch.tensor(values, dtype=torch.float64, device=worker.device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.tolist()


def write_result(path: Path, result: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, without_token(json.dumps(result, indent=1)) + "\n")
