#!/usr/bin/env python3
"""What a private step costs on one GPU, against the same step without privacy.

    python -m experiments.price                        all rows, all variants, three rounds
    python -m experiments.price --rows 8x1024 --variants ordinary bookkeeping
    python -m experiments.price --model llama-3.1-8b-block --compile
    python -m experiments.price --rows 4x1024 4x2048 4x4096 4x8192     growth with the length

The network has the shape of a Llama for sequence classification, the 1B one or some layers of the
8B one, with random weights in bfloat16, all of it trainable, `nn.RMSNorm` in place of the library's
own. Variants take turns in interleaved rounds; each is built, warmed up, timed and freed. Two
figures a step: forward, backward and clipping alone, and the complete step with noise and fused
AdamW. With --compile every variant's decoder layers are compiled, also those without privacy.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import MODES, PrivacyEngine
from experiments.price.models import LABELS, MODELS, VOCABULARY, compile_layers
from experiments.price.report import report
from experiments.rounds import Row, row_of
from measure import environment, plan_rounds, summarize, write_atomically
from measure.options import option, parse_options, positive

PROGRAM = "experiments.price"
VARIANTS = ("ordinary", "flash_bookkeeping", "flash", "bookkeeping", "opacus_ghost")
PER_LAYER = "_per_layer"  # behind a mode's name: clipping="per_layer"
CHOICES = ("ordinary", *MODES, *(mode + PER_LAYER for mode in MODES[1:]), "opacus_ghost")
WARM_UP = 3  # steps of a round that are not timed
Batch = tuple[Tensor, Tensor]


# fmt: off
@dataclass(frozen=True)
class Options:
    model: str = option(next(iter(MODELS)), "shape of the network", choices=tuple(MODELS))
    rows: tuple[Row, ...] | None = option(None, metavar="BxT", type=row_of, help=(
        "batch x tokens (default: five of the model's, 8192 to 16384 tokens of the 1B, "
        "4096 to 8192 of the 8B shape)"))
    variants: tuple[str, ...] = option(VARIANTS, choices=CHOICES, metavar="VARIANT",
        help=f"of {', '.join(CHOICES)}")
    rounds: int = option(3, "times each is built", check=positive)
    steps: int = option(5, "timed steps a round", check=positive)
    layers: int | None = option(None, "decoder layers (default: 16 of 1B, 4 of 8B)", check=positive)
    compile: bool = option(False, "compile each decoder layer, in all variants")
    profile: bool = option(False, "print the slowest kernels")
    output: Path | None = option(None, "JSON of all samples (default: none)")
# fmt: on


def parse(arguments: Sequence[str] | None) -> Options:
    """With the model's rows and layers where none are given."""
    options = parse_options(Options, arguments, prog=PROGRAM, description=__doc__)
    model = MODELS[options.model]
    rows = options.rows or tuple(Row(*row) for row in model.rows)
    return replace(options, rows=rows, layers=options.layers or model.layers)


@dataclass(frozen=True)
class Setting:
    """What all cells of a run have in common."""

    model: str
    layers: int
    compiled: bool
    steps: int
    profile: bool
    device: torch.device


class Run:
    """One variant, ready to step."""

    def __init__(self, variant: str, batch_size: int, setting: Setting):
        device = setting.device
        torch.manual_seed(0)
        self.network = MODELS[setting.model].build(setting.layers, device)
        optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=1e-5, fused=device.type == "cuda"
        )
        self.model, self.optimizer, self.criterion = self.network, optimizer, nn.CrossEntropyLoss()
        if variant != "ordinary":
            self._make_private(variant, optimizer, batch_size)
        if setting.compiled:
            compile_layers(self.network)

    def _make_private(
        self, variant: str, optimizer: torch.optim.Optimizer, batch_size: int
    ) -> None:
        if variant.startswith("opacus_"):
            from opacus import PrivacyEngine as Engine
        else:
            Engine = PrivacyEngine
        data = TensorDataset(torch.zeros(64 * batch_size, 1))
        self.model, self.optimizer, self.criterion, _ = Engine(accountant="rdp").make_private(
            module=self.network, optimizer=optimizer, criterion=self.criterion,
            data_loader=DataLoader(data, batch_size=batch_size), noise_multiplier=1.0,
            max_grad_norm=1.0, poisson_sampling=False,
            clipping="per_layer" if variant.endswith(PER_LAYER) else "flat",
            grad_sample_mode=variant.removeprefix("opacus_").removesuffix(PER_LAYER),
        )  # fmt: skip
        if Engine is PrivacyEngine:
            self.model.skip_checks()  # they would be in some of the few steps that are timed

    def backward(self, batch: Batch) -> None:
        tokens, labels = batch
        loss = self.criterion(self.model(input_ids=tokens).logits, labels)
        loss.backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def batch_of(row: Row, device: torch.device) -> Batch:
    """Random tokens [B, T] and labels [B]."""
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, row, generator=generator, device=device)
    return tokens, torch.randint(0, LABELS, row[:1], generator=generator, device=device)


def measure(variant: str, row: Row, setting: Setting) -> dict:
    """Milliseconds of each step and the peak of allocated memory, in MiB."""
    batch = batch_of(row, setting.device)
    run = Run(variant, len(batch[0]), setting)
    recorder = torch.profiler.profile() if setting.profile else nullcontext()
    marks = []
    count = WARM_UP + setting.steps
    for number in range(count):
        if number == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with recorder if number == count - 1 else nullcontext():
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(3)])
            start, middle, end = marks[-1]
            start.record()
            run.backward(batch)
            middle.record()
            run.finish()
            end.record()
    torch.cuda.synchronize()
    partial = [start.elapsed_time(middle) for start, middle, _ in marks[WARM_UP:]]
    complete = [start.elapsed_time(end) for start, _, end in marks[WARM_UP:]]
    peak = torch.cuda.max_memory_allocated() / (1 << 20)
    if setting.profile:
        print(f"{variant} {row}: kernels by time")
        print("\n".join(slowest(recorder)))
    return {"without_step_ms": partial, "step_ms": complete, "peak_mib": peak}


def slowest(recorder: torch.profiler.profile, count: int = 30) -> list[str]:
    """The kernels of one step by their total time: milliseconds, calls, name."""
    events = [
        event
        for event in recorder.key_averages()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1000
    lines = [f"{total:8.2f} ms in all"]
    for event in events[:count]:
        lines.append(
            f"{event.self_device_time_total / 1000:8.2f} {event.count:5d}  {event.key[:90]}"
        )
    return lines


def run_all(options: Options, setting: Setting, say: Callable[[str], None]) -> list[dict]:
    results = []
    for row in options.rows:
        for number, variant in plan_rounds(options.variants, options.rounds, 0):
            started = time.perf_counter()
            cell = {
                "row": str(row), "variant": variant, "round": number, "model": setting.model,
                "layers": setting.layers, "compiled": setting.compiled,
            }  # fmt: skip
            try:
                cell |= measure(variant, row, setting)
            except torch.cuda.OutOfMemoryError as error:
                cell["status"] = f"oom: {str(error)[:80]}"
            forget()
            results.append(cell)
            if options.output:
                write_atomically(
                    options.output,
                    json.dumps({"environment": environment(), "cells": results}, indent=1),
                )
            say(f"{describe(cell)}, {time.perf_counter() - started:.1f} s")
    return results


def forget() -> None:
    """Nothing of a cell helps or burdens the next: neither memory nor graphs for other shapes."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def describe(cell: dict) -> str:
    """One line of progress."""
    name = f"{cell['row']} {cell['variant']} round {cell['round']}"
    if "step_ms" not in cell:
        return f"{name}: {cell['status']}"
    return f"{name}: {summarize(cell['step_ms']).median:.1f} ms, {cell['peak_mib']:.0f} MiB"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print(f"{PROGRAM}: needs a CUDA device", file=sys.stderr)
        return 2
    setting = Setting(
        options.model, options.layers, options.compile, options.steps, options.profile,
        torch.device("cuda"),
    )  # fmt: skip
    results = run_all(options, setting, lambda text: print(text, flush=True))
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
