"""Limits how many functions a private step calls on the host, and how many files these are in."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from dp_clipping.kernels.launch.tiles import IS_CHECKED
from tests.support.forked import run_forked

pytestmark = pytest.mark.skipif(not IS_CHECKED, reason="this Triton launches by itself: more calls")

LAYERS = 2
LIMITS = {  # of one layer; of so many further ones
    "transformer": (478, 65), "convolutional": (459, 61), "compiled transformer": (519, 43),
}  # fmt: skip
# Small ones of ddp_by_hand.experiments.networks whose private step calls so few functions on the
# host. In the one that is left out, three layers are little beside what a step costs once.
SMALL = (
    "wide_resnet_16_4", "resnet18", "vit_b16", "bert_base", "gpt2_small", "llama_1b", "mobilenet",
    "audio_encoder", "diffusion_unet", "t5_small", "lstm", "lstm_packed", "transformer_encoder",
    "table", "video_resnet18",
)  # fmt: skip
TIMES, MORE = 1.9, 400  # of an ordinary step's calls, and these
WITHOUT_GPU = 2.5  # of an ordinary step's calls, with 12 layers
FILES = {"in plain PyTorch": 35, "on kernels": 48}  # of dp_clipping, that a step passes
COUNT = f"""
import json, warnings
import torch
from ddp_by_hand.experiments.networks.rows import ROWS
from ddp_by_hand.experiments.networks.training import training_of
from contextlib import nullcontext
from tests.dp_clipping.conftest import skip_all_checks
from tests.support.host_cost import WARM_UP, calls_of, files_of, step_of, without_kernels
warnings.simplefilter("ignore")
counts = {{}}
with without_kernels():
    for name in {tuple(LIMITS)}:
        for layers in (1, 1 + {LAYERS}):
            *compiled, network = name.split()
            step = step_of(network, layers, private=True, compiled=bool(compiled))
            for _ in range(WARM_UP):
                step()
            counts.setdefault(name, []).append(calls_of(step)[1])
    for name in {SMALL}:
        for variant in ("ordinary", "flash_bookkeeping"):
            training, batch = training_of(variant, ROWS[name], True, torch.device("cpu"))
            def step():
                training.backward(batch)
                training.step()
            if variant != "ordinary":
                skip_all_checks(training.model)
            for _ in range(2 if variant == "ordinary" else WARM_UP):
                step()
            counts.setdefault(name, []).append(calls_of(step)[0])
for how, context in zip({tuple(FILES)}, (nullcontext(), without_kernels()), strict=True):
    with context:
        step = step_of("transformer", 1, private=True)
        for _ in range(WARM_UP):
            step()
        counts[how] = files_of(step)
counts["without a GPU"] = []
for private in (False, True):
    step = step_of("transformer", 12, private)
    for _ in range(WARM_UP):
        step()
    counts["without a GPU"].append(calls_of(step)[0])
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Counts calls in a process of its own: a step looks at what the network's globals lead to."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path_factory.mktemp("count") / "count.py"
    script.write_text(COUNT)
    done = run_forked([sys.executable, str(script)], Path.cwd(), own, timeout=300)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", LIMITS)
def test_calls_of_a_step(counts, name):
    small, large = counts[name]
    once, further = LIMITS[name]
    assert small < once
    assert large - small < further


@pytest.mark.parametrize("name", SMALL)
def test_calls_beside_an_ordinary_step(counts, name):
    ordinary, private = counts[name]
    assert private <= TIMES * ordinary + MORE


def test_calls_without_a_gpu(counts):
    ordinary, private = counts["without a GPU"]
    assert private <= WITHOUT_GPU * ordinary


@pytest.mark.parametrize("how", FILES)
def test_files_that_a_step_passes(counts, how):
    assert len(counts[how]) <= FILES[how], counts[how]
