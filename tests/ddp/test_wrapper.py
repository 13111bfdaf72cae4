"""A wrapper is not copied; a loop that ends with the first rank that has no batch left."""

import copy
import io

import pytest
import torch

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import chain_loss, wrapped


def not_copied(context: Context, name: str) -> None:
    model = wrapped(context, name)
    for copying in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(RuntimeError, match=r"save model\.module, or model\.state_dict\(\)"):
            copying(model)


def joined(context: Context, name: str) -> None:
    """Ranks with other numbers of batches take as many steps as the one that has the fewest."""
    model = wrapped(context, name)
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    for batches in ((3, 2), (1, 4), (2, 2)):
        steps = 0
        with model.join():
            for step in range(batches[context.rank]):
                optimizer.zero_grad()
                chain_loss(step)(model, context.rank).backward()
                model.finish_gradient_synchronization()
                optimizer.step()
                steps += 1
        assert steps == min(batches)
    with pytest.raises(ZeroDivisionError), model.join():
        raise ZeroDivisionError


@pytest.mark.parametrize("body", [not_copied, joined])
def test_wrapper(ranks, implementation, body):
    ranks.run(2, body, implementation)
