"""Rows as the benchmark and the Llama grid write them, with times that a test can predict."""

import json
from pathlib import Path

import numpy as np

from ddp_by_hand.measure import Results
from ddp_by_hand.measure.results import SCHEMA_VERSION

PLACE = {
    "date": "2026-11-21T10:00:00+00:00", "python": "3.11.7", "cpu": "A processor", "cores": 2,
    "torch": "2.13.0", "cuda": None, "gpus": [{"name": "NVIDIA H200", "memory_mb": 143771}] * 2,
    "git_commit": "0123456789abcdef", "git_dirty": True, "command": ["bench.py", "--rounds", "5"],
}  # fmt: skip
CONFIG = {"model": {"context_length": 128, "d_ff": 8}, "batch_size": 4, "bucket_size_mb": None}


def steps(median: float, number: int, count: int = 6) -> list[float]:
    """Times of a round, some percent around the median."""
    generator = np.random.default_rng(number)
    return list(median * np.exp(generator.normal(0, 0.01, count)))


def record_benchmark(folder: Path, medians: dict, rounds: int = 5, **common) -> Path:
    """Implementation, or (implementation, clipping) -> median in ms, or how it failed.

    `common` overrides what rows have: `environment`, `memory` (MiB), `config`, `error`.
    """
    place = PLACE | common.get("environment", {})
    for subject, median in medians.items():
        name, clipping = (subject, None) if isinstance(subject, str) else subject
        config = {**CONFIG, **common.get("config", {}), "world_size": 2, "device": "cpu"}
        config["torch"] = place["torch"]
        named = {"implementation": name} | ({"clipping": clipping} if clipping else {})
        if clipping:
            config["clipping"] = {"mode": clipping, "noise_multiplier": 1.0}
        base = {**named, "environment": place, "invocation": "x"}
        mine = {"implementation": name}
        gate = {"kind": "gate", "round": -1, "status": "ok", "tolerance": 1e-4,
                "gradient_error": common.get("error", {}).get(name, 1e-7)}  # fmt: skip
        Results(folder).record({**base, **gate, "config": {**config, **mine, "kind": "gate"}})
        for number in range(rounds):
            row = {**base, "kind": "timing", "round": number}
            row["config"] = {**config, **mine, "kind": "timing", "round": number}
            if isinstance(median, str):
                row |= {"status": median, "reason": "no more"}
            else:
                row |= {
                    "status": "ok", "step_ms": steps(median, number), "total_batch_size": 8,
                    "untimed_step_ms": [1.0], "collectives": 3, "bytes": 3 << 20,
                    "peak_memory_bytes": common.get("memory", 100) << 20,
                }  # fmt: skip
            Results(folder).record(row)
    return folder


def llama_row(mode: str, length: int, median: float | str, rounds: int = 5, **common) -> dict:
    """A result file's content: all rounds of a cell."""
    failed = isinstance(median, str)
    return {
        "schema_version": SCHEMA_VERSION, "mode": mode, "seq_length": length, "batch_size": 1,
        "total_batch_size": 2, "num_gpus": 2, "num_processes": 2, "backend": "nccl",
        "device_type": "cuda", "status": median if failed else "ok",
        "config": {"model_name": "tiny", "clipping": "flat", "num_iter": 6, "sigma": 1.0,
                   "vocab_size": None if failed else 512} | common.get("config", {}),
        "environment": None if failed else PLACE,
        "command": ["python", "-m", "ddp_by_hand.experiments.llama_fsdp", "--model-name", "tiny"],
        "rounds": [
            {"round": number, "status": median, "reason": "no more", "step_ms": [],
             "forward_backward_ms": [], "peak_memory_mb": None}
            if failed else
            {"round": number, "status": "ok", "reason": None, "step_ms": steps(median, number),
             "forward_backward_ms": [0.9 * x for x in steps(median, number)],
             "peak_memory_mb": common.get("memory", 2048.0)}
            for number in range(rounds)
        ],
    }  # fmt: skip


def write_llama(folder: Path, medians: dict[tuple[str, int], float | str], **common) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for (mode, length), median in medians.items():
        row = llama_row(mode, length, median, **common)
        (folder / f"{mode}_seq{length}_result.json").write_text(json.dumps(row, indent=1))
    return folder
