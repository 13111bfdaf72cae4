"""The profiling switch: what it times, what it must not show, and that it is free when off."""

import json
import os
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from ddp import wrap
from ddp_by_hand.lm.parallel import TENSOR, parallelize
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.profiling import profile as profiling
from dp_clipping.profiling.profile import KEPT, SWITCH, Profile
from tests.support import zoo
from tests.support.engine import fixed, on_any_batches
from tests.support.on_ranks import on_ranks
from tests.support.sharded_steps import shard_fsdp2

SAMPLES = 4
ALWAYS = {"norm_pass", "norm_stack", "norm_local_sum", "clip_coefficients", "weighted_sum", "noise"}
ALONE = {"hand_over", "reduce_scatter", "gradient_sync", "norm_all_reduce"}


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")


class Training:
    """A private transformer, ready to step."""

    def __init__(self, network: nn.Module, mode: str, **options):
        run = on_any_batches(
            module=network, dataset=TensorDataset(torch.zeros(64, 1)), batch_size=SAMPLES,
            noise_generator=fixed(0), grad_sample_mode=mode, **{"max_grad_norm": 1.0, **options},
        )  # fmt: skip
        self.model, self.optimizer, self.criterion = run.model, run.optimizer, run.criterion

    def backward(self) -> None:
        tokens, labels = zoo.tokens(SAMPLES)
        logits = self.model(tokens)
        self.criterion(logits.transpose(1, 2), labels).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def network() -> nn.Module:
    return zoo.seeded(lambda: zoo.transformer(num_layers=1))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "profiler":  # labels, which compute nothing
            self.count[str(function)] += 1
        return function(*args, **kwargs or {})


def operators_of(training: Training) -> Counter[str]:
    training.step()  # where the samples are is looked for in the first
    with Operators() as seen:
        training.step()
    return seen.count


def made_by(function) -> int:
    """How many objects of the profile are made meanwhile."""
    made = []
    see = lambda *_, **__: made.append("one") or 0.0  # noqa: E731
    with patch.object(profiling._Span, "__init__", see), \
         patch.object(profiling.Profile, "__init__", see), \
         patch.object(torch.cuda, "Event", see), \
         patch.object(profiling.time, "perf_counter", see):  # fmt: skip
        function()
    return len(made)


@pytest.mark.parametrize("mode", ["ghost", "bookkeeping"])
def test_off_it_makes_nothing_and_on_it_launches_no_operator(mode, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    off = Training(network(), mode)
    assert off.model.profile is None
    without = operators_of(off)
    assert made_by(off.step) == 0
    with pytest.raises(RuntimeError, match=f"{SWITCH}=1"):
        off.model.profile_report()
    monkeypatch.setenv(SWITCH, "1")
    on = Training(network(), mode)
    assert operators_of(on) == without
    with patch.object(profiling._Span, "__init__", side_effect=AssertionError), \
         pytest.raises(AssertionError):  # so the count above would have seen it  # fmt: skip
        on.step()


@pytest.mark.parametrize("mode", ["per_sample", "ghost", "bookkeeping"])
def test_ranges_of_a_mode(mode, on):
    training = Training(network(), mode)
    for _ in range(2):
        training.step()
    names = {name for name, _ in training.model.network.named_parameters()}
    for step in training.model.profile.steps():
        ranges = step["ranges"]
        assert ranges.keys() >= ALWAYS
        assert not ALONE & ranges.keys()
        assert ("second_backward" in ranges) == (mode == "ghost")
        norms = [n.split("/", 2)[2] for n in ranges if n.startswith("norm/")]
        sums = [n.split("/", 1)[1] for n in ranges if n.startswith("sum/")]
        for shared in (norms, sums):
            assert {name for layers in shared for name in layers.split("+")} == names
        outer = sum(ranges[n]["ms"] for n in ("norm_pass", "clip_coefficients", "weighted_sum"))
        own = sum(t["own_ms"] for n, t in ranges.items() if n != "noise")
        assert own == pytest.approx(outer)
        assert all(t["own_ms"] >= 0 and t["calls"] >= 1 for t in ranges.values())
    json.dumps(training.model.profile.data(), allow_nan=False)


def test_norms_are_those_of_the_step(on):
    training = Training(network(), "bookkeeping")
    training.backward()
    squares = training.model.per_sample_gradient_norms.square()
    training.optimizer.step()
    ((one,),) = (step["norms"] for step in training.model.profile.steps())
    assert one.keys() == {"after"}
    assert one["after"]["shape"] == [1, SAMPLES]
    assert one["after"]["mean"] == pytest.approx(float(squares.mean()))
    assert one["after"]["max"] == pytest.approx(float(squares.max()))
    report = training.model.profile_report()
    assert "covered by ε" in report
    assert f"{one['after']['max']:.6g}" in report
    assert "first backward, norms included" in report
    assert not any(word in report for word in ("all-reduce", "Synchronisation", "sent"))  # alone


def test_release_is_not_profiled(on, caplog):
    """Calls and times of a step follow the size of its draw."""
    training = Training(network(), "bookkeeping", hide_unprotected=True)
    assert "does nothing with hide_unprotected=True" in caplog.text
    training.step()
    assert training.model.profile is None
    for refused in (training.model.profile_report, training.model.plan_table):
        with pytest.raises(
            RuntimeError, match="not covered by ε: it is off with hide_unprotected=True"
        ):
            refused()


def test_microbatches_are_one_step(on):
    training = Training(network(), "bookkeeping")
    for last in (False, True):
        training.optimizer.signal_skip_step(not last)
        training.step()
    (step,) = training.model.profile.steps()
    assert step["ranges"]["norm_pass"]["calls"] == 2
    assert len(step["norms"]) == 2


def test_a_step_that_failed_is_no_step(on):
    training = Training(network(), "bookkeeping")
    training.step()
    with patch("dp_clipping.step.sums.plain.coefficients", side_effect=MemoryError), \
         pytest.raises(MemoryError):  # fmt: skip
        training.backward()
    training.optimizer.zero_grad()
    training.step()
    calls = [step["ranges"]["norm_pass"]["calls"] for step in training.model.profile.steps()]
    assert calls == [1, 1]


def test_old_steps_are_read_by_themselves_and_keep_no_norms():
    profile = Profile(torch.device("cpu"))
    assert "No step" in profile.report()
    for _ in range(KEPT + 3):
        profile.note_norms(None, torch.tensor([[1.0, torch.inf]]))
        with profile.range("noise"):
            pass
    assert len(profile._steps) == 3
    assert [len(step["norms"]) for step in profile.steps()] == [0] * 3 + [1] * KEPT
    assert profile.steps()[-1]["norms"][0]["after"] == {"shape": [1, 2], "mean": None, "max": None}
    assert "not finite" in profile.report()
    profile.forget()
    assert profile.steps() == []


class FakeEvent:
    """A CUDA event of a device that has done everything when the host waits for it."""

    made = waits = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing
        FakeEvent.made += 1

    def record(self, stream: str) -> None:
        assert stream == "current"
        self.time = FakeEvent.now = getattr(FakeEvent, "now", 0.0) + 1.0

    def synchronize(self) -> None:
        FakeEvent.waits += 1

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.time - self.time


def test_events_are_read_when_asked_and_used_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    profile = Profile(torch.device("cuda", 0))

    def step() -> None:
        with profile.range("norm_pass"), profile.range("norm/dense/a"):
            pass
        with profile.range("noise"):
            pass

    step()
    assert (FakeEvent.made, FakeEvent.waits) == (6, 0)
    (one,) = profile.steps()
    assert FakeEvent.waits == 3
    assert one["ranges"]["norm_pass"] == {"ms": 3.0, "own_ms": 2.0, "calls": 1}
    assert one["ranges"]["norm/dense/a"] == {"ms": 1.0, "own_ms": 1.0, "calls": 1}
    step()
    assert FakeEvent.made == 6
    assert "CUDA events" in profile.report()


def test_switch_takes_0_and_1_only(monkeypatch):
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(ValueError, match="neither 1"):
        Training(network(), "bookkeeping")


def check_fused() -> None:
    os.environ[SWITCH] = "1"
    try:
        for mode in ("flash", "flash_bookkeeping"):
            training = Training(network(), mode)
            training.step()
            assert training.model.step_state.pending is None
            (step,) = training.model.profile.steps()
            ranges = step["ranges"]
            assert ranges.keys() >= ALWAYS
            assert ("second_backward" in ranges) == (mode == "flash")
            shared = [n for n in ranges if n.startswith("norm/input_length/") and "+" in n]
            shared += [n for n in ranges if n.startswith("norm/gradient/") and "+" in n]
            assert shared, ranges.keys()  # one launch of several layers is one range
            assert "more, one launch" in training.model.profile_report()
            assert step["norms"][0]["after"]["shape"] == [1, SAMPLES]
    finally:
        del os.environ[SWITCH]


def test_fused(interpreter):
    interpreter.run(check_fused)


@pytest.mark.parametrize("backend", ["ddp_bucketed", "fsdp2"])
@on_ranks(2)
def test_two_ranks(context: Context, backend: str) -> None:
    os.environ[SWITCH] = "1"
    try:
        if backend == "fsdp2":
            mesh = DeviceMesh.from_group(context.group, "cpu")
            built = shard_fsdp2(network(), "block", mesh)
        else:
            built = wrap("ddp_bucketed", network(), process_group=context.group)
        training = Training(built, "bookkeeping")
        training.step()
        (step,) = training.model.profile.steps()
        expected = {"hand_over", "gradient_sync"}
        expected |= {"reduce_scatter"} if backend == "fsdp2" else set()
        assert ALONE & step["ranges"].keys() == expected
        assert step["norms"][0].keys() == {"after"}  # a rank has whole layers for its samples
    finally:
        del os.environ[SWITCH]


@on_ranks(2)
def test_norms_before_and_after_the_all_reduce(context: Context) -> None:
    os.environ[SWITCH] = "1"
    try:
        for reduction in ("async", "layerwise"):
            built = network()
            mesh = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=(TENSOR,))
            parallelize(built, mesh)
            training = Training(built, "bookkeeping", norm_reduction=reduction)
            training.backward()
            squares = training.model.per_sample_gradient_norms.square()
            training.optimizer.step()
            (step,) = training.model.profile.steps()
            assert "norm_all_reduce" in step["ranges"]
            (norms,) = step["norms"]
            assert norms["before"]["shape"] == norms["after"]["shape"] == [1, SAMPLES]
            parts = torch.tensor(norms["before"]["mean"], dtype=torch.float64)
            torch.distributed.all_reduce(parts, group=context.group)
            assert norms["after"]["mean"] == pytest.approx(float(squares.mean()), rel=1e-5)
            assert float(parts) == pytest.approx(norms["after"]["mean"], rel=1e-5)
            assert norms["before"]["mean"] < norms["after"]["mean"]
    finally:
        del os.environ[SWITCH]


@on_ranks(2)
def test_a_trace_has_the_ranges_of_what_crosses_ranks(context: Context) -> None:
    """With tensor parallel alone each rank has the sums of its parts: nothing is scattered."""
    built = network()
    mesh = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=(TENSOR,))
    parallelize(built, mesh)
    training = Training(built, "bookkeeping")
    with torch.profiler.profile() as trace:
        training.step()
    names = {event.name for event in trace.events()}
    assert "norm_all_reduce" in names
    assert "reduce_scatter" not in names
