"""Steps cut at each gradient, of operators on a CPU and of kernels on a GPU."""

import json
from dataclasses import replace

import pytest

from ddp_by_hand.tracing import load_trace, load_traces, pieces, slowdown

MS = 1000.0


def event(name, start, duration, category="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "cat": category,
            "pid": 1, "tid": tid, "args": args}  # fmt: skip


def phases(*ranges):
    return [event(name, start, end - start, "user_annotation") for name, start, end in ranges]


def write(path, events):
    path.write_text(json.dumps({"traceEvents": events, "configuration": {"batch_size": 4}}))
    return load_trace(path)


def two_ranks(folder, kernels: bool, late: float):
    """Steps of 30 ms of products; a collective that rank 1 joins `late` ms after rank 0."""
    paths = []
    for rank in (0, 1):
        start = 12 * MS + rank * late * MS
        category, name = ("kernel", "nccl_all_reduce") if kernels else ("cpu_op", "gloo:all_reduce")
        product = "nvjet_gemm" if kernels else "aten::mm"
        device = "kernel" if kernels else "cpu_op"
        document = {
            "traceEvents": [
                *phases(("forward_pass", 0, 10 * MS), ("backward_pass", 10 * MS, 30 * MS),
                        ("optimizer_step", 30 * MS, 32 * MS)),
                event(product, 0, 10 * MS, device), event(product, 10 * MS, 20 * MS, device),
                event("torch::autograd::AccumulateGrad", 29 * MS, 1),
                event(name, start, 22 * MS - start, category, tid=2),
                event("adamw", 30 * MS, 2 * MS, device),
            ],
            "distributedInfo": {"rank": rank}, "boot_id": "one",
        }  # fmt: skip
        paths.append(folder / f"{kernels}_{late}_{rank}.json")
        paths[-1].write_text(json.dumps(document))
    return load_traces(paths)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_kernel_that_waits_is_beside_computation_and_a_thread_is_not(tmp_path, kernels):
    (step,) = pieces(two_ranks(tmp_path, kernels, late=4.0)[0])
    assert step.beside[0] == pytest.approx(10e-3 if kernels else 6e-3)
    assert step.whole.communication == 6 * MS


def test_slowdown_compares_products_and_idle_time(tmp_path):
    (own,) = pieces(two_ranks(tmp_path, True, late=4.0)[0])
    faster = replace(own, forward=(8e-3, 0, 5e-3, 0), whole=replace(own.whole, idle=-1 * MS))
    found = slowdown([own], [faster])
    assert found.beside == pytest.approx(10e-3)
    assert found.longer == pytest.approx(2e-3)
    assert (found.communicating, found.overlapped) == pytest.approx((6e-3, 6e-3))
    assert found.idle == pytest.approx(1e-3)


def test_operators_are_told_apart_and_cut_at_each_gradient(tmp_path):
    trace = write(tmp_path / "cpu.json", [
        *phases(("forward_pass", 0, 10 * MS), ("backward_pass", 10 * MS, 30 * MS),
                ("gradient_sync", 30 * MS, 33 * MS), ("optimizer_step", 33 * MS, 38 * MS),
                ("forward_pass", 40 * MS, 41 * MS)),
        event("aten::mm", 0, 4 * MS),
        event("aten::scaled_dot_product_attention", 4 * MS, 3 * MS),
        event("aten::bmm", 5 * MS, 1 * MS),  # of attention: it counts as a product
        event("aten::mul", 7 * MS, 2 * MS),
        event("aten::mm", 10 * MS, 6 * MS),
        event("torch::autograd::AccumulateGrad", 18 * MS, 1),
        event("aten::add", 20 * MS, 5 * MS),
        event("torch::autograd::AccumulateGrad", 26 * MS, 1),
        event("gloo:all_reduce", 24 * MS, 8 * MS, tid=2),
        event("aten::_fused_adamw_", 33 * MS, 5 * MS),
    ])  # fmt: skip
    assert trace.configuration == {"batch_size": 4}
    (step,) = pieces(trace)  # the second one has no backward
    assert step.forward == pytest.approx((5e-3, 2e-3, 2e-3, 1e-3))
    first, last = step.backward
    assert first == pytest.approx((6e-3, 0, 0, 2e-3), abs=1e-5)
    assert last == pytest.approx((0, 0, 5e-3, 7e-3), abs=1e-5)  # to the end of backward
    assert step.optimizer == pytest.approx(5e-3)
    assert step.rest == pytest.approx(2e-3)
    assert step.seconds == pytest.approx(40e-3)
    assert not step.clipped
    assert (step.whole.overlapped, step.whole.exposed) == (1 * MS, 7 * MS)
    assert step.beside == pytest.approx((0, 0, 1e-3, 5e-3))  # 24 to 30 ms, of backward


def launched(name, at, start, duration, number):
    """A kernel, and the call on the CPU that launched it."""
    return [
        event("cudaLaunchKernel", at, 1, "cuda_runtime", correlation=number),
        event(name, start, duration, "kernel", tid=7, correlation=number),
    ]


def test_on_a_gpu_a_gradient_is_final_when_what_was_launched_before_is_done(tmp_path):
    """The CPU runs ahead: both nodes are visited before the first kernel of backward ends."""
    trace = write(tmp_path / "gpu.json", [
        *phases(("forward_pass", 0, 5), ("backward_pass", 10, 40), ("optimizer_step", 50, 60)),
        *launched("sm90_xmma_gemm_bf16", 1, 100, 300, 1),
        *launched("nvjet_tst_128x256", 11, 400, 200, 2),
        *launched("flash_bwd_dq_cutlass_kernel", 12, 600, 100, 3),
        event("torch::autograd::AccumulateGrad", 20, 1),
        *launched("vectorized_elementwise_kernel", 25, 750, 50, 4),
        event("torch::autograd::AccumulateGrad", 30, 1),
        *launched("multi_tensor_apply_kernel", 51, 900, 80, 5),
    ])  # fmt: skip
    assert trace.gradients == [700, 800]
    assert trace.kinds["products"] == [(100, 400), (400, 600)]
    assert trace.kinds["attention"] == [(600, 700)]  # although made with cutlass
    (step,) = pieces(trace)
    assert step.backward[0] == pytest.approx((200e-6, 100e-6, 0, 0))
    assert step.backward[1] == pytest.approx((0, 0, 50e-6, 50e-6))
    assert step.optimizer == pytest.approx(80e-6)


def test_a_step_that_clipped_says_so(tmp_path):
    trace = write(tmp_path / "clipped.json", [
        *phases(("forward_pass", 0, 5), ("backward_pass", 10, 40),
                ("gradient_clipping_warmup", 41, 45), ("optimizer_step", 50, 60)),
        event("aten::mm", 0, 4),
        event("torch::autograd::AccumulateGrad", 20, 1),
    ])  # fmt: skip
    assert [step.clipped for step in pieces(trace)] == [True]
