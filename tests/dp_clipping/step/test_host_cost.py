"""Limits how many functions a private step calls on the host."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.support.host_cost import NETWORKS

LAYERS = 4
LIMITS = {
    "transformer": (645, 35),
    "convolutional": (626, 123),
}  # of one layer; of a further one
COUNT = f"""
import json
from tests.support.host_cost import NETWORKS, WARM_UP, calls_of, step_of, without_kernels
counts = {{}}
with without_kernels():
    for name in NETWORKS:
        for layers in (1, 1 + {LAYERS}):
            step = step_of(name, layers, private=True)
            for _ in range(WARM_UP):
                step()
            counts.setdefault(name, []).append(calls_of(step)[1])
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts():
    """Counts calls in a process of its own: a step looks at what the network's globals lead to."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COUNT], env=own, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NETWORKS)
def test_calls_of_a_step(counts, name):
    small, large = counts[name]
    once, layer = LIMITS[name]
    assert small < once
    assert large - small < LAYERS * layer
