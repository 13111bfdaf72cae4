"""PyTorch's own DDP behind the same methods."""

import pytest
import torch
from torch import nn

from ddp import wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.on_ranks import on_ranks


class Boom(RuntimeError):
    pass


def raise_boom(_parameter: torch.Tensor) -> None:
    raise Boom


@on_ranks(1)
def test_after_a_failed_hook_pytorch_raises_its_own_error(context: Context) -> None:
    """PyTorch's reducer, which has not finished, raises its own error in the next forward."""
    model = wrap("torch_ddp", nn.Linear(2, 1), process_group=context.group)
    handle = model.module.weight.register_post_accumulate_grad_hook(raise_boom)
    with pytest.raises(Boom):
        model(torch.ones(1, 2)).sum().backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"finished reduction in the prior iteration"):
        model(torch.ones(1, 2))


@on_ranks(1)
def test_the_tuned_variant_learns_its_graph_in_a_step_that_synchronises(context: Context) -> None:
    model = wrap("torch_ddp_tuned", nn.Linear(2, 1), process_group=context.group)
    with model.no_sync(), pytest.raises(RuntimeError, match="first training step"):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()
    assert (model.module.weight.grad == 1).all()
    assert model.stats()["collectives"] == 1
