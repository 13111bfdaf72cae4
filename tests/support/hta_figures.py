"""Figures of a GPU trace by HolisticTraceAnalysis 0.5.0, for the tests of `ddp_by_hand.tracing`.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis==0.5.0 "pandas<3"
    /tmp/hta/bin/python tests/support/hta_figures.py tests/tracing/fixtures/gpu_streams.json

prints them as JSON, as in `gpu_streams_by_hta.json`. It is run by itself: HTA needs older packages
than the project, and is no dependency. With --write it makes the trace first: kernels and
collectives of random lengths on three streams, in the profiler's format. `gpu_h200.json.gz` is a
real one, of three training steps on an NVIDIA H200 (CUDA 13.0) whose batches come from pinned
memory on a stream of their own.

HTA rounds each event to whole microseconds unless it is told not to: on that trace, 1 % of the idle
time. What it calls compute time is kernels alone; `tracing` counts copies too.
"""

import gzip
import json
import os
import random
import sys
import tempfile
from pathlib import Path

NAMES = {7: "ampere_sgemm_128x64_tn", 20: "ncclDevKernel_AllReduce_Sum_f32", 21: "vectorized_add"}
CALLS, SEED = 40, 3


def written(path: Path) -> None:
    """Writes a trace: each kernel with the call that launched it, on a thread that runs ahead."""
    draw, events, number = random.Random(SEED), [], 0
    for stream, name in NAMES.items():
        at = 1000 + draw.randrange(50)
        for _ in range(CALLS):
            at += draw.choice([0, 3, 20, 90])
            length = draw.randrange(5, 120)
            number += 1
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1,
                    "tid": 1, "ts": number * 4, "dur": 2,
                    "args": {"cbid": 211, "correlation": number}}  # fmt: skip
            kernel = {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": at,
                "dur": length,
                "args": {"device": 0, "stream": stream, "correlation": number},
            }
            events += [call, kernel]
            at += length
    events.sort(key=lambda event: event["ts"])
    facts = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1}}
    lines = ",\n".join(map(json.dumps, events))
    path.write_text(json.dumps(facts)[:-1] + ', "traceEvents": [\n' + lines + "\n]}\n")


def figures(path: Path) -> dict[str, float | None]:
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis

    with tempfile.TemporaryDirectory() as folder:
        read = gzip.open if path.suffix == ".gz" else open
        with read(path, "rb") as file:
            (Path(folder) / "rank.json").write_bytes(file.read())
        trace = TraceAnalysis(trace_files={0: "rank.json"}, trace_dir=folder)
        times = trace.get_temporal_breakdown(visualize=False).iloc[0]
        overlap = trace.get_comm_comp_overlap(visualize=False).iloc[0]
    return {
        "idle": float(times["idle_time(us)"]),
        "computation": float(times["compute_time(us)"]),
        "exposed": float(times["non_compute_time(us)"]),
        "span": float(times["kernel_time(us)"]),
        "overlap_percent": _number(overlap["comp_comm_overlap_pctg"]),
    }


def _number(x: float) -> float | None:
    """Returns None for NaN, which is the share of no communication that is hidden."""
    return float(x) if x == x else None


if __name__ == "__main__":
    trace_file = Path(sys.argv[1])
    if "--write" in sys.argv:
        written(trace_file)
    print(json.dumps(figures(trace_file), indent=1))
