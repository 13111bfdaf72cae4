"""What linear layers will be given, where compiled code must know it beforehand."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from dp_clipping.capture.compile_forecast import CompiledShapes, Forecaster, refuse_repeated
from dp_clipping.capture.layout_search import Search
from dp_clipping.clipping.norms import Norm, Norms
from dp_clipping.planning.cost_model import LinearShape
from tests.dp_clipping.conftest import Unseen, private
from tests.support import zoo


@pytest.mark.parametrize(("size", "planned"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_plans_are_made_for_the_next_power_of_two(size, planned):
    assert CompiledShapes.planned(size) == planned
    parameter = Parameter(torch.zeros(1))
    shapes = CompiledShapes({parameter: LinearShape("w", 1, 7, 3, 2, 4, 4)}, {}, 0)
    assert shapes.of_batch(size)[parameter] == LinearShape("w", planned, 7, 3, 2, 4, 4)


def test_shapes_of_units_are_found_once():
    """Returns the same object for one number of examples, which keeps what follows from it."""
    linear, table = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    shapes = CompiledShapes({linear: LinearShape("w", 1, 7, 3, 2, 4, 4)}, {}, 5, {table: 4})
    assert shapes.of_units(1) is shapes
    units = shapes.of_units(3)
    assert shapes.of_units(3) is units
    assert (units.uses[linear].tokens, units.held, units.look_ups[table]) == (21, 15, 12)
    assert units.of_batch(3) is units.of_batch(4) is not units.of_batch(5)


def forecast(network: nn.Module, x: torch.Tensor) -> CompiledShapes:
    capture = private(network, "bookkeeping").capture
    search = Search(capture)
    rows = lambda n: ((x[[i % len(x) for i in range(n)]],), {})  # noqa: E731
    search.establish(rows(2), rows(3), rows(2), lambda: None)
    return Forecaster(capture, search.observe).of(((x[:1],), {}), rows)


def test_uses_of_one_sample():
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    found = forecast(network, torch.randn(5, 7, 4))
    assert [(use.tokens, use.inputs, use.outputs) for use in found.uses.values()] == [
        (7, 4, 6),
        (7, 6, 3),
    ]
    assert set(found.dtypes.values()) == {torch.float32}
    assert found.held >= 7 * (4 + 6) * 4


def test_what_the_forward_keeps_is_freed():
    """Also where a node keeps its own output, as that of tanh does."""
    network, kept = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), Unseen()
    network[1].register_forward_hook(lambda module, inputs, y: kept.values.append(weakref.ref(y)))
    forecast(network, torch.randn(5, 7, 4))
    gc.collect()
    assert kept.values
    assert not any(y() is not None for y in kept.values)


def test_weights_that_are_used_twice_are_left_out():
    network = zoo.Net(lambda net, x: net.layer(net.layer(x)), layer=nn.Linear(4, 4))
    assert not forecast(network, torch.randn(3, 4)).uses


def test_a_weight_that_was_used_twice_leaves_all_samples_out():
    """Uses of several weights are counted together. Those of others do not matter."""
    one, other = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    for counts, groups, finite in (
        ((1.0, 2.0), [one, other], True),
        ((1.0, 3.0), [one, other], False),
        ((1.0, 3.0), [one], True),
        ((1.0, 2.0), [other], True),
    ):
        norms = Norms(1, torch.zeros(3))
        for record in groups:
            norms.add(record, Norm(torch.ones(3)))
        mine = (frozenset([one]), frozenset([other, Parameter(torch.zeros(1))]))
        found = [
            (of, torch.tensor([count]), len(of)) for of, count in zip(mine, counts, strict=True)
        ]
        refuse_repeated(norms, found, groups)
        assert bool(norms.squared().isfinite().all()) is finite
