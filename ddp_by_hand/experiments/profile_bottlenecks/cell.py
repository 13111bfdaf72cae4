"""One length of `experiments.profile_bottlenecks`: where the time of a private step goes.

Steps with the profiling switch on and off take turns: the phases are those of steps with it, the
complete time is that of steps without, and what lies between is what the switch costs. One further
step is recorded by PyTorch's profiler: when the device computes, sends, and does neither.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ddp_by_hand.experiments.llama_fsdp.cell import LlamaTraining, make_batches
from ddp_by_hand.experiments.llama_fsdp.results import GridCell, GridSettings, single_result
from ddp_by_hand.experiments.profile_bottlenecks.verdict import PHASES
from ddp_by_hand.experiments.training import Batch
from ddp_by_hand.lm.runtime import Hardware, Worker
from ddp_by_hand.lm.timing import PeakMemory, StepClock, max_over_ranks, wait_for_all
from ddp_by_hand.measure import OK, environment
from ddp_by_hand.tracing import load_trace, overlap, phase, profile

COLLECTIVES = ("norm_all_reduce", "hand_over", "reduce_scatter", "gradient_sync")


def measure(
    cell: GridCell, settings: GridSettings, hardware: Hardware, worker: Worker, watch: Any
) -> dict:
    """Measures this length. Times are in milliseconds, phases are those of rank 0."""
    watch.at("building the model")
    training = LlamaTraining(cell, settings, worker)
    batches = make_batches(cell.seq_length, training.config.vocab_size, settings, worker)
    warm_up, timed = batches[: settings.warmup_iter], batches[settings.warmup_iter :]
    for number, batch in enumerate(warm_up):
        watch.at(f"warm-up step {number + 1}")
        step(training, batch)
    training.forget_warm_up()
    wait_for_all(worker.device)
    memory = PeakMemory(worker.device)
    with_it, without = take_turns(training, timed, worker, watch)
    peak = max_over_ranks([float(memory.bytes() or 0)], worker.device)[0]
    phases = phases_of(with_it, training.profile.steps())
    data = training.profile.data()
    watch.at("the traced step")
    trace = traced(training, timed[-1], worker)
    totals = max_over_ranks([sum(parts) for parts in without], worker.device)
    backward = max_over_ranks([sum(parts[:3]) for parts in without], worker.device)
    result = single_result(
        cell, settings, hardware, worker.world_size, status=OK, step_ms=totals,
        forward_backward_ms=backward, peak_bytes=peak or None, environment=environment(),
        profile=data, sizes=training.sizes,
    )  # fmt: skip
    return result | {
        "phases_ms": phases,
        "layer_norm_ms": layer_norms(data["ranges"]),
        "step_with_profiling_ms": max_over_ranks([sum(parts) for parts in with_it], worker.device),
        "trace": trace,
        "plan_seconds": plan_seconds(training),
        "device_memory_mb": device_memory(worker.device),
    }


def step(training: LlamaTraining, batch: Batch, clock: StepClock | None = None) -> None:
    """Marks after forward, backward, the exchange of sums, and noise with AdamW."""
    mark = (lambda: None) if clock is None else clock.mark
    tokens, labels = batch
    with phase("forward_pass"):
        loss = training.criterion(training.model(input_ids=tokens).logits, labels)
    mark()
    loss.backward()
    mark()
    training.model.finish_synchronization()
    mark()
    with phase("optimizer_step"):
        training.step()
    mark()


def take_turns(
    training: LlamaTraining, batches: Sequence[Batch], worker: Worker, watch: Any
) -> tuple[list[list[float]], list[list[float]]]:
    """Times the four parts of each step, with the profiling switch on and off."""
    clocks = {True: [], False: []}
    for number, batch in enumerate(batches):
        watch.at(f"step {number + 1}")
        for is_on in (True, False) if number % 2 else (False, True):
            training.profile.is_on = is_on
            clock = StepClock(worker.device)
            clock.mark()
            step(training, batch, clock)
            clocks[is_on].append(clock)
    training.profile.is_on = True
    wait_for_all(worker.device)
    with_it, without = ([c.milliseconds() for c in clocks[is_on]] for is_on in (True, False))
    return with_it, without


def phases_of(parts: Sequence[Sequence[float]], steps: Sequence[dict]) -> dict[str, float]:
    """Returns medians over the steps of rank 0, for the phases that occur."""
    found: dict[str, list[float]] = {}
    for marks, one in zip(parts, steps, strict=True):
        for name, ms in split(marks, one["ranges"]).items():
            found.setdefault(name, []).append(ms)
    return {name: median(found[name]) for name in PHASES if name in found}


def split(marks: Sequence[float], ranges: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Splits one step into phases: each range's own time, and the rest of each part."""
    own = {name: times["own_ms"] for name, times in ranges.items()}
    layers = {
        what: [ms for n, ms in own.items() if n.startswith(what)] for what in ("norm/", "sum/")
    }
    take = lambda *names: sum(own.get(name, 0.0) for name in names)  # noqa: E731
    found = {
        "forward": marks[0],
        "norms": sum(layers["norm/"]),
        "coefficients": take("clip_coefficients", "norm_stack", "norm_local_sum"),
        "second backward": take("second_backward"),
        "sums": sum(layers["sum/"]) + take("weighted_sum"),
        "collectives": take(*COLLECTIVES),
        "noise": take("noise"),
        "optimizer": max(0.0, marks[3] - take("noise")),
    }
    others = sum(ms for name, ms in found.items() if name not in ("forward", "optimizer", "noise"))
    found["first backward"] = max(0.0, marks[1] + marks[2] - others)
    absent = {"second backward": ["second_backward"], "collectives": COLLECTIVES}
    gone = [n for n, needed in absent.items() if not any(one in own for one in needed)]
    return {name: ms for name, ms in found.items() if name not in gone}


def layer_norms(ranges: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns layer (or layers of one launch) -> milliseconds per step."""
    found: dict[str, float] = {}
    for name, times in ranges.items():
        if name.startswith("norm/"):
            layers = name.split("/", 2)[2]
            found[layers] = found.get(layers, 0.0) + times["own_ms"]
    return found


def traced(training: LlamaTraining, batch: Batch, worker: Worker) -> dict[str, Any]:
    """Traces one step of rank 0. Returns milliseconds; see `tracing.Overlap`."""
    if not worker.is_first:
        step(training, batch)
        wait_for_all(worker.device)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(path, device_type=worker.device.type, memory=False):
            step(training, batch)
        found = overlap(load_trace(path))
    wait_for_all(worker.device)
    names = ("span", "computation", "communication", "exposed", "idle")
    return {"basis": found.basis} | {n: getattr(found, n) / 1000 for n in names}


def plan_seconds(training: LlamaTraining) -> dict[str, float] | None:
    """Predicts the seconds of all linear norms and sums, as planned and as `auto` would plan.

    None where no fused kernels ran.
    """
    from dp_clipping.planning.cost_model import rates_of
    from dp_clipping.planning.plan import Plan

    plan = training.model.step_context.plans.last
    if plan is None:
        return None
    free = Plan(plan.uses, rates_of(training.model.capture.trigger.device))
    return {
        "planned": sum(choice.seconds for choice in plan.choices),
        "auto": sum(choice.seconds for choice in free.choices),
    }


def device_memory(device: torch.device) -> float | None:
    """Returns the GPU's memory in MiB; None without one."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory / 2**20
