#!/usr/bin/env python3
"""What a private step costs on one GPU, against the same step without privacy.

    python -m experiments.price                        all rows, all variants, three rounds
    python -m experiments.price --rows 8x1024 --variants ordinary bookkeeping

The network is the Llama-3.2-1B shape for sequence classification with random weights in bfloat16,
all of it trainable, `nn.RMSNorm` in place of the library's own. Variants take turns in interleaved
rounds; each is built, warmed up, timed and freed. Two figures a step: forward, backward and
clipping alone, and the complete step with noise and fused AdamW.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import MODES, PrivacyEngine
from measure import (
    Column,
    environment,
    format_table,
    plan_rounds,
    ratio,
    summarize,
    write_atomically,
)

ROWS = {"16x512": (16, 512), "8x1024": (8, 1024), "4x2048": (4, 2048), "4x4096": (4, 4096),
        "2x8192": (2, 8192)}  # fmt: skip
VARIANTS = ("ordinary", "flash_bookkeeping", "flash", "bookkeeping", "opacus_ghost")
PER_LAYER = "_per_layer"  # behind a mode's name: clipping="per_layer"
CHOICES = ("ordinary", *MODES, *(mode + PER_LAYER for mode in MODES[1:]), "opacus_ghost")
LABELS = 3
WARM_UP = 2  # steps of a round that are not timed
Batch = tuple[Tensor, Tensor]


def build(layers: int, device: torch.device) -> nn.Module:
    """The Llama-3.2-1B shape with `layers` blocks."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=16_384,
        num_labels=LABELS, pad_token_id=0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        network = LlamaForSequenceClassification(config).to(torch.bfloat16)
        for module in list(network.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                    setattr(module, name, norm.to(torch.bfloat16))
    return network.train()


class Run:
    """One variant, ready to step."""

    def __init__(self, variant: str, layers: int, batch_size: int, device: torch.device):
        torch.manual_seed(0)
        self.network = build(layers, device)
        optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=1e-5, fused=device.type == "cuda"
        )
        self.model, self.optimizer, self.criterion = self.network, optimizer, nn.CrossEntropyLoss()
        if variant != "ordinary":
            self._make_private(variant, optimizer, batch_size)

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

    def backward(self, batch: Batch) -> None:
        tokens, labels = batch
        loss = self.criterion(self.model(input_ids=tokens).logits, labels)
        loss.backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(
    variant: str, row: str, layers: int, steps: int, device: torch.device, profile: bool
) -> dict:
    """Milliseconds of each step and the peak of allocated memory, in MiB."""
    batch_size, length = ROWS[row]
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(1, 128_256, (batch_size, length), generator=generator, device=device)
    labels = torch.randint(0, LABELS, (batch_size,), generator=generator, device=device)
    run = Run(variant, layers, batch_size, device)
    recorder = torch.profiler.profile() if profile else nullcontext()
    marks = []
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with recorder if number == WARM_UP + steps - 1 else nullcontext():
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(3)])
            start, middle, end = marks[-1]
            start.record()
            run.backward((tokens, labels))
            middle.record()
            run.finish()
            end.record()
    torch.cuda.synchronize()
    partial = [start.elapsed_time(middle) for start, middle, _ in marks[WARM_UP:]]
    complete = [start.elapsed_time(end) for start, _, end in marks[WARM_UP:]]
    peak = torch.cuda.max_memory_allocated() / (1 << 20)
    if profile:
        print(f"{variant} {row}: kernels by time")
        print("\n".join(slowest(recorder)))
    del run
    gc.collect()
    torch.cuda.empty_cache()
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


def run_all(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict]:
    device = torch.device("cuda")
    results = []
    for row in options.rows:
        for number, variant in plan_rounds(options.variants, options.rounds, 0):
            started = time.perf_counter()
            cell = {"row": row, "variant": variant, "round": number, "layers": options.layers}
            try:
                cell |= measure(
                    variant, row, options.layers, options.steps, device, options.profile
                )
            except torch.cuda.OutOfMemoryError as error:
                cell["status"] = f"oom: {str(error)[:80]}"
                gc.collect()
                torch.cuda.empty_cache()
            results.append(cell)
            if options.output:
                write_atomically(
                    options.output,
                    json.dumps({"environment": environment(), "cells": results}, indent=1),
                )
            say(f"{describe(cell)}, {time.perf_counter() - started:.1f} s")
    return results


def describe(cell: dict) -> str:
    """One line of progress."""
    name = f"{cell['row']} {cell['variant']} round {cell['round']}"
    if "step_ms" not in cell:
        return f"{name}: {cell['status']}"
    return f"{name}: {summarize(cell['step_ms']).median:.1f} ms, {cell['peak_mib']:.0f} MiB"


def report(results: list[dict]) -> str:
    """One line a row and variant: ratios to `ordinary` of the same rounds."""
    lines = []
    for row in dict.fromkeys(cell["row"] for cell in results):
        cells = [c for c in results if c["row"] == row and "step_ms" in c]
        base = [c for c in cells if c["variant"] == "ordinary"]
        for variant in dict.fromkeys(c["variant"] for c in cells):
            own = [c for c in cells if c["variant"] == variant]
            peak = max(c["peak_mib"] for c in own)
            step = summarize([x for c in own for x in c["step_ms"]]).median
            line = {"row": row, "variant": variant, "step ms": step, "peak MiB": peak}
            if base:
                whole, part = (_ratio(own, base, key) for key in ("step_ms", "without_step_ms"))
                line |= {
                    "ratio": whole.value, "low": whole.low, "high": whole.high,
                    "without step": part.value,
                    "peak ratio": peak / max(c["peak_mib"] for c in base),
                }  # fmt: skip
            lines.append(line)
    columns = ["row", "variant", Column("step ms", format=".1f")]
    columns += [Column(key, format=".3f") for key in ("ratio", "low", "high", "without step")]
    columns += [Column("peak MiB", format=",.0f"), Column("peak ratio", format=".3f")]
    return format_table(columns, lines)


def _ratio(own: list[dict], base: list[dict], key: str):
    rounds = sorted({c["round"] for c in own} & {c["round"] for c in base})
    pick = lambda cells: [next(c[key] for c in cells if c["round"] == r) for r in rounds]  # noqa: E731
    return ratio(pick(own), pick(base))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="experiments.price",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS),
        help="batch x tokens (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--variants", nargs="+", choices=CHOICES,
        default=list(VARIANTS), help=f"default: {' '.join(VARIANTS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="times each is built (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a round (default: 5)")
    parser.add_argument("--layers", type=int, default=16, help="blocks (default: 16, the 1B shape)")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels")
    parser.add_argument("--output", type=Path, help="JSON of all samples (default: none)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("experiments.price: needs a CUDA device", file=sys.stderr)
        return 2
    results = run_all(options, lambda text: print(text, flush=True))
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
