"""Traces without a GPU: two real ones, and hand-written traps."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from ddp_by_hand.tracing import PHASES, load_trace, overlap, steps
from ddp_by_hand.tracing.intervals import difference, total

HERE = Path(__file__).parent


FIXTURES = {name: HERE / f"fixtures/gloo_{name}.json" for name in ("synchronous", "overlapped")}
PARAMETERS, STEPS = 6, 2


def raster(path, prefix, span):
    """Microseconds of the span in which an event of that name ran: the slow way to measure."""
    start, end = span
    busy = np.zeros(round(end - start), dtype=bool)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["name"].startswith(prefix):
            first, last = event["ts"] - start, event["ts"] + event["dur"] - start
            busy[max(round(first), 0) : max(round(last), 0)] = True
    return busy


@pytest.mark.parametrize("name", FIXTURES)
def test_real_trace_equals_a_microsecond_raster(name):
    trace = load_trace(FIXTURES[name])
    result = overlap(trace)
    computing = raster(FIXTURES[name], "aten::", trace.span)
    communicating = raster(FIXTURES[name], "gloo:", trace.span)
    close = {"rel": 0.01, "abs": 20}
    assert result.computation == pytest.approx(computing.sum(), **close)
    assert result.communication == pytest.approx(communicating.sum(), **close)
    assert result.overlapped == pytest.approx((computing & communicating).sum(), **close)
    assert result.exposed == pytest.approx((~computing & communicating).sum(), **close)
    assert result.idle == pytest.approx((~computing & ~communicating).sum(), **close)


@pytest.mark.parametrize("name", FIXTURES)
def test_real_trace_has_its_parts(name):
    trace = load_trace(FIXTURES[name])
    assert trace.basis == "CPU operators (a proxy)"
    assert len(trace.communication) == PARAMETERS * STEPS
    assert len(steps(trace)) == overlap(trace).steps == STEPS
    ordinary = {"forward_pass", "backward_pass", "gradient_sync", "optimizer_step"}
    assert set(trace.phases) == ordinary < set(PHASES)


def test_what_of_a_trace_is_hidden():
    trace = load_trace(FIXTURES["synchronous"])
    result = overlap(trace)
    assert total(difference(trace.communication, trace.phases["gradient_sync"])) == 0
    assert result.overlapped < 0.001 * result.communication
    assert 0.3 < overlap(load_trace(FIXTURES["overlapped"])).overlap_fraction < 1


def event(name, start, end, thread=1, cat="cpu_op"):
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread} | times


def load(tmp_path, events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return load_trace(path)


def test_a_wait_inside_a_backward_hook_is_not_computation(tmp_path):
    wrapper = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    events = [
        event("AddmmBackward0", 0, 12),
        event("aten::mm", 0, 10),
        event(wrapper, 12, 100),
        event("torch::autograd::AccumulateGrad", 12, 100),
        event("aten::add_", 12, 14),
        event("c10d::allreduce_", 20, 25),
        event("gloo:all_reduce", 22, 90, thread=2, cat="user_annotation"),
    ]
    trace = load(tmp_path, events)
    assert trace.computation == [(0, 10), (12, 14)]
    assert trace.communication == [(22, 90)]
    assert overlap(trace).exposed == 68


def test_collectives_inside_a_compiled_graph_are_cut_out(tmp_path):
    events = [
        event("## Call CompiledFxGraph f1 ##", 0, 100),
        event("_c10d_functional::wait_tensor", 40, 70),
        event("gloo:all_reduce", 30, 70, thread=2, cat="user_annotation"),
    ]
    trace = load(tmp_path, events)
    assert trace.computation == [(0, 40), (70, 100)]
    assert overlap(trace).overlapped == 10


def test_threads_do_not_stop_each_other_and_gloos_own_belongs_to_the_collective(tmp_path):
    events = [event("c10d::allreduce_", 0, 50, thread=1), event("aten::mm", 0, 50, thread=3)]
    assert load(tmp_path, events).computation == [(0, 50)]
    events = [
        event("gloo:all_reduce", 0, 50, thread=2, cat="user_annotation"),
        event("aten::div_", 40, 45, thread=2),
    ]
    assert load(tmp_path, events).computation == []
    name = "torch::distributed::reducer::mul_out"
    assert load(tmp_path, [event(name, 0, 5)]).computation == [(0, 5)]


def test_compressed_trace_reads_the_same(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(FIXTURES["overlapped"].read_bytes()))
    assert load_trace(path) == load_trace(FIXTURES["overlapped"])


def test_only_the_steps_count(tmp_path):
    """The barrier before the first step and the export after the last are not training."""
    events = [
        event("epoch_0_training_lr_0.001", 0, 100, cat="user_annotation"),
        event("gloo:barrier", 5, 10, thread=2, cat="user_annotation"),
        event("forward_pass", 20, 40, cat="user_annotation"),
        event("aten::mm", 20, 40),
        event("gloo:all_reduce", 40, 60, thread=2, cat="user_annotation"),
        event("optimizer_step", 60, 80, cat="user_annotation"),
        event("aten::add_", 60, 80),
        event("aten::item", 85, 95),
    ]
    trace = load(tmp_path, events)
    assert trace.span == (20, 80)
    assert overlap(trace).computation == 40
    assert overlap(trace).communication == 20
    without_phases = load(tmp_path, [e for e in events if not e["name"].endswith(("pass", "step"))])
    assert without_phases.span == (0, 100)
    assert steps(without_phases) == []


def broken_files(folder):
    text = FIXTURES["overlapped"].read_bytes()
    contents = {
        "empty.json": b"",
        "cut.json": text[: len(text) // 2],
        "cut.json.gz": gzip.compress(text)[:4000],
        "plain.json.gz": text,
        "binary.json": bytes(range(256)),
        "list.json": b"[]",
        "no_events.json": b'{"traceEvents": []}',
        "other.json": b'{"traceEvents": "x"}',
        "no_times.json": b'{"traceEvents": [{"ph": "X", "name": "aten::mm"}]}',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return sorted(contents)


def test_broken_file_is_named_on_one_line(tmp_path):
    for name in broken_files(tmp_path):
        with pytest.raises(ValueError, match=r"json") as caught:
            load_trace(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
