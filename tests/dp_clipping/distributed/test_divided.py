"""Private training where each rank steps a part of the parameters: zero1, zero2, fsdp by hand."""

import numpy as np
import pytest
import torch

from lm.rank_pool import Context
from tests.support.replicas import SPLITS, Beside, alone, applied, build, parameters, train

VARIANTS = ["zero1", "zero2", "fsdp"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def beside_oracle(context: Context, variant: str, mode: str, name: str, clipping: str) -> None:
    pair = Beside(context, variant, mode, name, clipping)
    for sizes in SPLITS[context.world_size]:
        pair.check_step(sizes)


@every_variant
@pytest.mark.parametrize(("mode", "name", "clipping"), [
    ("bookkeeping", "transformer_tied", "flat"),
    ("ghost", "transformer", "per_layer"),
    ("flash_bookkeeping", "transformer", "flat"),
])  # fmt: skip
def test_sums_are_those_of_one_process(cpu_ranks, variant, mode, name, clipping):
    cpu_ranks.run(2, beside_oracle, variant, mode, name, clipping)


def steps(context: Context, variant: str, options: dict) -> tuple[np.ndarray, np.ndarray]:
    run = build(context, variant, **options)
    train(run, 3)
    return applied(run), parameters(run)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_and_steps_are_those_of_one_process(cpu_ranks, variant, dtype):
    """Each element gets the noise of its place in the parameter, whoever steps it."""
    options = {"name": "transformer", "dtype": dtype}
    answers = cpu_ranks.run(2, steps, variant, options)
    expected = alone(3, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for found in answers:
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
