"""Private training where each rank steps a part of the parameters: zero1, zero2, fsdp by hand."""

import gc
import weakref

import pytest
import torch

from ddp import wrap
from dp_clipping.arguments.given import check_optimizer
from lm.rank_pool import Context
from tests.support.replicas import build, train

VARIANTS = ["zero1", "zero2", "fsdp"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def refused(context: Context, variant: str) -> None:
    run = build(context, variant)
    inputs, targets, _ = next(iter(run.loader))
    run.criterion(run.model(inputs), targets).backward()
    wrapper = run.optimizer.model.module
    wrapper.finish_gradient_synchronization()
    wrapper.clip_grad_norm_(0.1)  # of sums that have no noise yet
    with pytest.raises(RuntimeError, match=r"gradient of .* was changed"):
        run.optimizer.step()
    module = wrap(variant, torch.nn.Linear(3, 2), process_group=context.group)
    plain = torch.optim.AdamW(module.parameters())
    with pytest.raises(ValueError, match=r"module\.make_optimizer\(AdamW"):
        check_optimizer(plain, module)


@every_variant
def test_what_is_refused(cpu_ranks, variant):
    cpu_ranks.run(2, refused, variant)


def is_freed(context: Context, variant: str, mode: str) -> bool:
    run = build(context, variant, name="transformer", grad_sample_mode=mode)
    train(run, 2)
    held = weakref.ref(run.model)
    del run
    gc.collect()
    return held() is None


@pytest.mark.parametrize("variant", [*VARIANTS, "ddp_bucketed"])
@pytest.mark.parametrize("mode", ["per_sample", "flash_bookkeeping"])
def test_a_run_that_nobody_holds_is_freed(cpu_ranks, variant, mode):
    """Its network, its optimizer state and its gathered parameters with it."""
    assert cpu_ranks.run(2, is_freed, variant, mode) == [True, True]
