"""Compares our figures with those that HolisticTraceAnalysis 0.5.0 gave of the same traces.

`gpu_streams.json` has kernels and collectives of random lengths on three streams, in the profiler's
format. `gpu_h200.json.gz` is a real one, of three training steps on an NVIDIA H200 (CUDA 13.0)
whose batches come from pinned memory on a stream of their own. The figures beside them are those of
`TraceAnalysis.get_temporal_breakdown` and `get_comm_comp_overlap`, with HTA_DISABLE_NS_ROUNDING=1:
HTA rounds each event to whole microseconds otherwise. It needs older packages than the project.
"""

import gzip
import json
from pathlib import Path

import pytest

from ddp_by_hand.tracing import Trace, load_trace, overlap

FIXTURES = Path(__file__).parent / "fixtures"
QUANTUM = 0.05  # µs: times of events are floats of 13 digits, and each rounds by 1 ns


def by_hta(name: str) -> dict[str, float]:
    return json.loads((FIXTURES / f"{name}_by_hta.json").read_text())


def of_all_work(trace: Trace):
    """From the first to the last work on the device, as HTA counts."""
    work = trace.computation + trace.communication
    return overlap(trace, (min(start for start, _ in work), max(end for _, end in work)))


def test_times_of_three_streams_are_those_of_hta():
    found = overlap(load_trace(FIXTURES / "gpu_streams.json"))
    expected = by_hta("gpu_streams")
    percent = expected.pop("overlap_percent")
    assert {name: getattr(found, name) for name in expected} == expected
    assert 100 * found.overlap_fraction == pytest.approx(percent, abs=0.01)


def test_times_of_a_training_on_a_gpu_are_those_of_hta(tmp_path):
    """HTA's compute time is without copies: so is ours, of the trace without them."""
    path, expected = FIXTURES / "gpu_h200.json.gz", by_hta("gpu_h200")
    trace = load_trace(path)
    found = of_all_work(trace)
    assert found.span == pytest.approx(expected["span"], abs=QUANTUM)
    assert found.idle == pytest.approx(expected["idle"], abs=QUANTUM)
    busy = expected["computation"] + expected["exposed"]
    assert found.computation + found.exposed == pytest.approx(busy, abs=QUANTUM)
    assert found.overlap_fraction is expected["overlap_percent"] is None
    document = json.loads(gzip.decompress(path.read_bytes()))
    copies = [e for e in document["traceEvents"] if e.get("cat") in ("gpu_memcpy", "gpu_memset")]
    document["traceEvents"] = [e for e in document["traceEvents"] if e not in copies]
    (tmp_path / "kernels.json").write_text(json.dumps(document))
    kernels = of_all_work(load_trace(tmp_path / "kernels.json"))
    assert len(copies) == 19
    assert kernels.computation == pytest.approx(expected["computation"], abs=QUANTUM)
