"""Limits how many functions a private step calls on the host."""

import pytest

pytest.importorskip("triton")

from dp_clipping.kernels.launch.tiles import INTERPRETED
from tests.support.host_cost import NETWORKS, WARM_UP, calls_of, step_of, without_kernels

LAYERS = 4
# Of one layer, with what checks look at in a process that has imported much; of each further one.
LIMITS = {"transformer": (1400, 475), "convolutional": (1190, 305)}


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched by Triton's launcher")
@pytest.mark.parametrize("name", NETWORKS)
def test_calls_of_a_step(name):
    counts = []
    with without_kernels():
        for layers in (1, 1 + LAYERS):
            step = step_of(name, layers, private=True)
            for _ in range(WARM_UP):
                step()
            counts.append(calls_of(step)[1])
    once, layer = LIMITS[name]
    assert counts[0] < once, counts
    assert counts[1] - counts[0] < LAYERS * layer, counts
