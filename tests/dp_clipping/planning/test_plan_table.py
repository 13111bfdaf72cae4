"""The plan as text, and what a profiler measured of it."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dp_clipping.clipping.statistics import NOT_COVERED
from dp_clipping.planning.cost_model import LinearShape, Rates
from dp_clipping.planning.plan import Plan
from tests.dp_clipping.conftest import MODES, clipped_sums, private

BATCH = (torch.randn(3, 4, 8), torch.randn(3, 4, 8))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


@pytest.mark.parametrize("mode", [*MODES, "no_dp"])
def test_a_plain_mode_has_no_plan_and_says_which_have(mode):
    with pytest.raises(RuntimeError, match=f"mode {mode} has no plan: choose .*flash_bookkeeping"):
        private(network(), mode).plan_table()


def test_before_a_fused_step_there_is_no_plan():
    model = private(network(), "flash_bookkeeping")
    with pytest.raises(RuntimeError, match=r"call plan_table\(\) after loss.backward\(\)"):
        model.plan_table()
    model.step_context.plans.last = Plan([LinearShape("0.weight", 3, 4, 8, 8, 4, 4)], Rates())
    plan = model.step_context.plans.last.table()
    assert model.plan_table() == f"{plan}\n\n{NOT_COVERED}", "it has the size of the batch"


def test_times_of_ranges_are_the_layers():
    uses = [
        LinearShape(name, 2, 4, 8, outputs, 4, 4)
        for name, outputs in [("a", 8), ("b", 8), ("c", 24)]
    ]
    plan = Plan(uses, Rates())
    measured = plan.measured({
        "norm/width/a+c": 6.0, "norm/gradient/d/e": 1.0, "sum/a": 0.5, "sum/a.bias": 9.0,
        "norm/dense/a.bias+b.bias": 9.0, "sum/c": 0.25, "sum/a.bias+c+b": 4.0,
        "norm/tiles/a+convolution": 9.0,
    })  # fmt: skip
    # norms: 16 and 32 of 48 features; sums: 24 and 8 of 32 outputs
    assert measured == {"a": 2.5, "b": 1.0, "c": 4.0 + 0.25 + 3.0}
    assert plan.table(measured).splitlines()[-1].endswith("10750.000")


@pytest.mark.parametrize("mode", MODES)
def test_layers_have_ranges_while_a_profiler_records(mode):
    model = private(network(), mode)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        clipped_sums(model, BATCH)
    names = {event.name for event in recorded.events()}
    work = [name.rpartition("/") for name in names if name.startswith(("norm/", "sum/"))]
    for parameter in model.capture.names.values():  # several may share a launch
        kinds = {kind for kind, _, layers in work if parameter in layers.split("+")}
        assert "sum" in kinds
        assert {"norm/dense", "norm/factors"} & kinds


def test_without_a_profiler_nothing_is_recorded(monkeypatch):
    def refuse(name: str):
        return pytest.fail(name) if "/" in name else torch.profiler.record_function(name)

    monkeypatch.setattr("dp_clipping.profiling.profile.record_function", refuse)
    clipped_sums(private(network()), BATCH)
