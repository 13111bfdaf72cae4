"""Private training where each rank steps a part of the parameters: zero1, zero2, fsdp by hand."""

import gc
import weakref

import pytest
import torch

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.arguments.given import check_optimizer
from dp_clipping.step.sums import work
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.on_ranks import on_ranks
from tests.support.replicas import build, train
from tests.support.sharded_steps import Counted

VARIANTS = ["zero1", "zero2", "fsdp"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
@on_ranks(2)
def test_what_is_refused(context: Context, variant: str) -> None:
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


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(24))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def short_of_memory(context: Context) -> tuple[list[str], torch.Tensor]:
    """The collectives of a step in which nothing may wait on rank 1, and its summed gradient."""
    torch.manual_seed(0)
    module = wrap("fsdp", Blocks(), process_group=context.group)
    model = private(module, "ghost", 1.0)
    model.skip_checks()
    with Counted() as counted, pytest.MonkeyPatch.context() as patch:
        if context.rank == 1:
            patch.setattr(work, "PENDING_BYTES", 0)
            patch.setattr(work.Work, "_has_room", lambda own: False)
        private_loss(model, (torch.randn(3, 5, 4), torch.randn(3, 5, 4)), zoo.product).backward()
        module.finish_gradient_synchronization()
    return counted.calls, torch.cat([g.flatten() for g in module.whole_gradients()])


def test_a_rank_that_is_short_of_memory_sends_where_the_others_do(cpu_ranks):
    (calls, sums), (others, same) = cpu_ranks.run(2, short_of_memory)
    assert calls == others
    assert "reduce_scatter" in " ".join(calls)
    torch.testing.assert_close(sums, same)


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
