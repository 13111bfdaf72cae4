"""Kernels compile for a GPU, also where there is none: Triton's interpreter checks no types."""

import os
import sys
from pathlib import Path

import pytest

from ddp_by_hand.experiments.networks.rows import ROWS
from tests.support.forked import run_forked

FAST = "audio_encoder"  # convolutions of one output channel, matrices, attention
STEPS = """
import sys, warnings
import torch
from ddp_by_hand.experiments.networks.rows import ROWS
from ddp_by_hand.experiments.networks.training import training_of
from tests.support.host_cost import NoKernel, without_kernels
warnings.simplefilter("ignore")
with without_kernels(compiles=True):
    training, batch = training_of("flash_bookkeeping", ROWS[sys.argv[1]], True, torch.device("cpu"))
    for _ in range(2):
        training.backward(batch)
        training.step()
assert NoKernel.launches
"""


@pytest.mark.parametrize(
    "name", [pytest.param(row, marks=[] if row == FAST else pytest.mark.slow) for row in ROWS]
)
def test_kernels_of_a_network(name: str, tmp_path: Path) -> None:
    """Compiles what steps of a small network launch, with the values that Triton specializes."""
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    own = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    own["TRITON_CACHE_DIR"] = str(tmp_path / "kernels")
    done = run_forked([sys.executable, str(script), name], Path.cwd(), own, timeout=300)
    assert not done.returncode, done.stderr
