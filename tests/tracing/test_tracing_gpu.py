"""Hand-written GPU traces whose answers are known exactly."""

import json

import pytest

from ddp_by_hand.tracing import load_trace, overlap, steps

MAIN, SIDE, AUTOGRAD_THREAD, MAIN_THREAD = 7, 20, 200, 100


def kernel(name, start, end, stream=MAIN, correlation=None, cat="kernel"):
    args = {} if correlation is None else {"correlation": correlation}
    return event(cat, name, start, end, 0, stream) | {"args": args}


def event(cat, name, start, end, pid=1, tid=MAIN_THREAD):
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid} | times


def launch(start, correlation, thread=MAIN_THREAD):
    call = event("cuda_runtime", "cudaLaunchKernel", start, start + 1, tid=thread)
    return call | {"args": {"correlation": correlation}}


def phase(name, start, end):
    return event("user_annotation", name, start, end)


def on_device(name, start, end, stream=MAIN):
    return event("gpu_user_annotation", name, start, end, 0, stream)


def load(tmp_path, events, rank=3):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events}))
    return load_trace(path)


def one_step(at=0, first=1):
    """CPU ahead of the GPU; the all-reduce is half under the last matmul of backward."""
    return [
        phase("forward_pass", at + 0, at + 10),
        launch(at + 2, first),
        kernel("gemm_forward", at + 20, at + 120, correlation=first),
        phase("backward_pass", at + 10, at + 20),
        launch(at + 12, first + 1, AUTOGRAD_THREAD),
        launch(at + 14, first + 2, AUTOGRAD_THREAD),
        launch(at + 16, first + 3, AUTOGRAD_THREAD),
        kernel("gemm_backward", at + 120, at + 220, correlation=first + 1),
        kernel("ncclDevKernel_AllReduce", at + 220, at + 320, SIDE, first + 2),
        kernel("gemm_backward", at + 220, at + 270, correlation=first + 3),
        phase("gradient_sync", at + 20, at + 24),
        phase("optimizer_step", at + 24, at + 30),
        launch(at + 25, first + 4),
        kernel("adam", at + 330, at + 370, correlation=first + 4),
    ]


def test_a_half_hidden_allreduce_gives_exact_times_and_phases_lie_where_their_kernels_ran(tmp_path):
    trace = load(tmp_path, one_step())
    result = overlap(trace)
    assert (trace.rank, trace.basis, trace.span) == (3, "GPU kernels", (20, 370))
    assert result.computation == 100 + 100 + 50 + 40
    assert result.communication == 100
    assert result.overlapped == 50
    assert result.exposed == 50
    assert result.idle == 10
    assert result.overlap_fraction == 0.5
    assert result.span == 350
    # backward's kernels are launched by another thread, and the wait has no kernel at all
    trace = load(tmp_path, one_step())
    assert trace.phases == {
        "forward_pass": [(20, 120)],
        "backward_pass": [(120, 270)],
        "gradient_sync": [(270, 330)],
        "optimizer_step": [(330, 370)],
    }
    assert trace.phase_basis == "kernels by launch"


def test_a_layers_range_has_the_time_of_the_kernels_launched_in_it(tmp_path):
    """By any thread, in every step; communication is none of it."""
    layers = [
        event("user_annotation", name, at + start, at + end, tid=AUTOGRAD_THREAD)
        for at in (0, 1000)
        for name, start, end in [("norm/width/a+b", 11, 13), ("sum/a", 13, 15), ("sum/b", 16, 17)]
    ]
    trace = load(tmp_path, [*one_step(), *one_step(1000, 11), *layers])
    assert trace.layers == {"norm/width/a+b": 200, "sum/a": 0, "sum/b": 100}
    assert load(tmp_path, one_step()).layers == {}


def test_gradient_sync_without_a_wait_is_empty(tmp_path):
    events = [e for e in one_step() if "nccl" not in e["name"] and e["name"] != "adam"]
    trace = load(tmp_path, [*events, kernel("adam", 270, 300, correlation=5)])
    assert trace.phases["gradient_sync"] == [(270, 270)]


def test_two_steps_and_two_forwards_that_accumulate(tmp_path):
    trace = load(tmp_path, one_step() + one_step(at=400, first=11))
    assert steps(trace) == [(20, 420), (420, 770)]
    whole = overlap(trace)
    assert (whole.steps, whole.exposed, whole.idle) == (2, 100, 70)
    assert whole.per_step().exposed == 50
    assert whole.per_step().phases["backward_pass"] == 150
    second = overlap(trace, steps(trace)[1])
    assert (second.steps, second.span, second.exposed) == (1, 350, 50)
    events = one_step()
    extra = [phase("forward_pass", 9, 9.5), launch(9.2, 99)]
    trace = load(tmp_path, [*events, *extra, kernel("gemm", 110, 115, correlation=99)])
    assert len(trace.phases["forward_pass"]) == 2
    assert steps(trace) == [(20, 370)]


def test_copy_engine_ranges_on_a_side_stream_are_communication(tmp_path):
    events = [
        phase("forward_pass", -50, -40),
        launch(-45, 1),
        kernel("gemm", 0, 100, correlation=1),
        on_device("communication:bucket_0", 40, 160, SIDE),
        kernel("barrier_kernel", 40, 50, SIDE),
        kernel("Memcpy PtoP (Device -> Device)", 60, 120, SIDE, cat="gpu_memcpy"),
        kernel("sum_kernel", 130, 160, SIDE),
        kernel("Memcpy HtoD (Pinned -> Device)", 200, 210, SIDE, cat="gpu_memcpy"),
        # on the main stream the same kind of range wraps the copy into the bucket: the model's time
        on_device("communication:bucket_0", 90, 100),
    ]
    result = overlap(load(tmp_path, events), (0, 300))
    assert result.communication == 120  # the whole range, its waits between barriers too
    assert result.computation == 100 + 10
    assert result.overlapped == 60
    assert result.exposed == 60


def test_without_launches_the_profilers_projection_places_phases(tmp_path):
    events = [phase("forward_pass", 0, 5), on_device("forward_pass", 20, 120), kernel("g", 20, 120)]
    trace = load(tmp_path, events)
    assert trace.phases == {"forward_pass": [(20, 120)]}
    assert trace.phase_basis == "the profiler's projection"


def test_main_stream_is_where_forward_ran_though_another_has_more_kernels(tmp_path):
    events = one_step() + [kernel("prefetch", 30 + i, 31 + i, SIDE + 1) for i in range(20)]
    trace = load(tmp_path, [*events, on_device("communication:bucket_0", 220, 270)])
    assert trace.communication == [(220, 320)]


def test_no_communication_has_no_fraction(tmp_path):
    result = overlap(load(tmp_path, [kernel("gemm", 0, 100)]))
    assert result.overlap_fraction is None
    assert result.per_step() is None
    assert result.communication == result.exposed == 0


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce", "ncclKernel_X", "NCCL:all_reduce"])
def test_nccl_in_any_case_is_communication(tmp_path, name):
    assert load(tmp_path, [kernel(name, 0, 9)]).communication == [(0, 9)]
