"""The same on GPUs, where collectives, noise and autograd run on streams and other threads."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.noise import fused_update
from dp_clipping.step import gradient_noise
from tests.ddp.conftest import CPU_COPY_ENGINE
from tests.support.ranks import started, values
from tests.support.replicas import SPLITS, Beside, alone, applied, build, on_gpus, parameters, train

VARIANTS = [
    "ddp_bucketed", "ddp_individual_v2", CPU_COPY_ENGINE, "torch_ddp", "zero1", "zero2", "fsdp"
]  # fmt: skip
MODES = ["bookkeeping", "ghost"]
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 3e-2}

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: on_gpus(variant))


def beside_oracle(context: Context, variant: str) -> None:
    """Sums and norms in both modes and types."""
    for mode in MODES:
        for dtype, tolerance in TOLERANCES.items():
            pair = Beside(context, variant, mode, dtype=dtype, tolerance=tolerance)
            for sizes in SPLITS[context.world_size]:
                pair.check_step(sizes)


def noisy_steps(context: Context, variant: str, dtype: torch.dtype, steps: int) -> tuple:
    """What the last step applied, and the parameters after it, with microbatches of one sample."""
    run = build(context, variant, name="transformer", dtype=dtype)
    train(run, steps, microbatch=1)
    return applied(run), parameters(run)


def check_noisy_steps(ranks, world_size: int, variant: str) -> None:
    """Replicas are equal bit by bit, and equal one process on the CPU with the same keys."""
    for dtype, tolerance in {torch.float32: 2e-4, torch.bfloat16: 5e-2}.items():
        answers = ranks.run(world_size, noisy_steps, variant, dtype, 3)
        assert len({(g.tobytes(), p.tobytes()) for g, p in answers}) == 1, "replicas differ"
        _, expected = alone(3, name="transformer", dtype=dtype)
        np.testing.assert_allclose(answers[0][1], expected, rtol=0, atol=tolerance)


def fused_steps(context: Context, layout: str) -> None:
    """The kernel updates this rank's parts of all parameters, as the optimizer would."""
    found, seen = [], []

    def updates_of(*given):
        seen.append(fused_update.updates_of(*given))
        return seen[-1]

    with patch.object(gradient_noise, "updates_of", updates_of):
        for fused in (True, False):
            run = started(context, layout, name="transformer", fused_step=fused)
            train(run, 3)
            found.append(values(run))
    assert len(seen) == 3
    assert all(update is not None for update in seen[-1])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["ddp", "fsdp2 block", "tensor"])
def test_fused_steps_on_gpus(gpu_ranks, layout):
    gpu_ranks.run(2, fused_steps, layout)


@pytest.mark.gpu
@every_variant
def test_sums_on_gpus(gpu_ranks, variant):
    for world_size in {2, gpu_ranks.size}:
        gpu_ranks.run(world_size, beside_oracle, on_gpus(variant))


@pytest.mark.gpu
@every_variant
def test_replicas_on_gpus(gpu_ranks, variant):
    check_noisy_steps(gpu_ranks, gpu_ranks.size, on_gpus(variant))
