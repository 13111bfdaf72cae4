"""Figures of a GPU trace by HolisticTraceAnalysis 0.5.0, for the tests of `ddp_by_hand.tracing`.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis==0.5.0 "pandas<3"
    /tmp/hta/bin/python tests/support/hta_figures.py tests/tracing/fixtures/gpu_streams.json

prints them as JSON, as in `gpu_streams_by_hta.json`. It is run by itself: HTA needs older packages
than the project, and is no dependency. `gpu_streams.json` has kernels and collectives of random
lengths on three streams, in the profiler's format. `gpu_h200.json.gz` is a real one, of three
training steps on an NVIDIA H200 (CUDA 13.0) whose batches come from pinned memory on a stream of
their own.

HTA rounds each event to whole microseconds unless it is told not to: on that trace, 1 % of the idle
time. What it calls compute time is kernels alone; `tracing` counts copies too.
"""

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path


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
    print(json.dumps(figures(Path(sys.argv[1])), indent=1))
