"""Several backwards, one reduction: `no_sync`, two synchronising backwards, no zeroing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Chain,
    chain_loss,
    make_optimizer,
    small_buckets,
    whole_values,
)

CASES = [("mean", True), ("sum", False)]  # reduce, set_to_none


def two_synchronising_backwards(context: Context, name: str) -> None:
    for reduce, set_to_none in CASES:
        pair = Beside(context, name, Chain(), reduce=reduce, **small_buckets(name))
        for step in range(3):
            pair.backward(chain_loss(2 * step))
            pair.backward(chain_loss(2 * step + 1))
            pair.finish()
            pair.zero_grad(set_to_none)


def no_sync_then_synchronise(context: Context, name: str) -> None:
    for reduce, set_to_none in CASES:
        pair = Beside(context, name, Chain(), reduce=reduce, **small_buckets(name))
        for step in range(3):
            for micro in range(2):
                pair.backward(chain_loss(10 * step + micro), synchronise=False)
            pair.backward(chain_loss(10 * step + 2))
            pair.finish()
            pair.zero_grad(set_to_none)


def never_zeroed(context: Context, name: str) -> None:
    for reduce in ("mean", "sum"):
        pair = Beside(context, name, Chain(), reduce=reduce, **small_buckets(name))
        for step in range(4):
            pair.backward(chain_loss(2 * step), synchronise=False)
            pair.backward(chain_loss(2 * step + 1))
            pair.finish()


def no_sync_behind_a_synchronising_backward(context: Context, name: str) -> None:
    for reduce, set_to_none in CASES:
        pair = Beside(context, name, Chain(), reduce=reduce, **small_buckets(name))
        for step in range(2):
            pair.backward(chain_loss(2 * step))
            pair.backward(chain_loss(2 * step + 1), synchronise=False)
            pair.finish()
            pair.zero_grad(set_to_none)


def several_forwards(context: Context, name: str) -> None:
    pair = Beside(context, name, Chain(), **small_buckets(name))

    def loss(model, rank):
        return sum(chain_loss(seed)(model, rank) for seed in (1, 2, 3))

    for _ in range(3):
        pair.step(loss)


def two_forwards_then_two_backwards(context: Context, name: str) -> None:
    pair = Beside(context, name, Chain(), **small_buckets(name))
    for step in range(3):
        first, second = (chain_loss(2 * step + k)(pair.model, context.rank) for k in range(2))
        first.backward()
        second.backward()
        for k in range(2):
            pair.reference_backward(chain_loss(2 * step + k))
        pair.finish()
        pair.zero_grad(set_to_none=True)


def exception_in_no_sync(context: Context, name: str) -> None:
    pair = Beside(context, name, Chain(), **small_buckets(name))
    pair.step(chain_loss(0))
    with pytest.raises(KeyError), pair.model.no_sync():
        raise KeyError
    pair.step(chain_loss(1))
    with pair.model.no_sync(), pair.model.no_sync():
        pass
    pair.step(chain_loss(2))


def second_finish(context: Context, name: str) -> None:
    for reduce in ("mean", "sum"):
        pair = Beside(context, name, Chain(), reduce=reduce, **small_buckets(name))
        pair.model.finish_gradient_synchronization()  # nothing has happened yet
        for step in range(3):
            pair.backward(chain_loss(step))
            pair.finish()
            if context.rank == 0:  # no collective: one rank alone may call it
                pair.model.finish_gradient_synchronization()
            pair.compare()
            pair.zero_grad(set_to_none=False)


def views_are_rebound(context: Context, name: str) -> None:
    """Both ways of zeroing in turn; the optimizer always sees this step's values."""
    pair = Beside(context, name, Chain(), **small_buckets(name))
    optimizers = [
        make_optimizer(m, torch.optim.AdamW, lr=0.01) for m in (pair.model, pair.reference)
    ]
    for step in range(6):
        pair.backward(chain_loss(step))
        pair.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 1)
    for p, q in zip(whole_values(pair.model), pair.reference.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach())


class CheckpointedChain(Chain):
    def forward(self, x):
        for layer in [*self.layers, self.layers[0]]:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
        return x


def activation_checkpointing(context: Context, name: str) -> None:
    for unused in (False, True):
        options = dict(small_buckets(name), find_unused_parameters=unused)
        pair = Beside(context, name, CheckpointedChain(), **options)
        for step in range(3):
            pair.step(chain_loss(step), set_to_none=step == 0)


def autograd_grad_changes_nothing(context: Context, name: str) -> None:
    """`torch.autograd.grad` between finish and the optimizer accumulates nothing."""
    pair = Beside(context, name, Chain(), reduce="sum", **small_buckets(name))
    for step in range(2):
        pair.backward(chain_loss(step))
        pair.finish()
        loss = chain_loss(9)(pair.model.module, context.rank)
        torch.autograd.grad(loss, list(pair.model.parameters()))
        pair.compare()


# PyTorch's reducer is done, or not prepared, at the second backward of these.
BEYOND_TORCH = [no_sync_behind_a_synchronising_backward, two_forwards_then_two_backwards]


@pytest.mark.parametrize(
    "body",
    [
        two_synchronising_backwards,
        no_sync_then_synchronise,
        never_zeroed,
        several_forwards,
        exception_in_no_sync,
        second_finish,
        views_are_rebound,
        activation_checkpointing,
        autograd_grad_changes_nothing,
    ],
)
def test_accumulation(ranks, implementation, body):
    ranks.run(2, body, implementation)


@pytest.mark.parametrize("body", BEYOND_TORCH)
def test_accumulation_beyond_torch(ranks, hand_built, body):
    ranks.run(2, body, hand_built)


def test_accumulation_on_three_ranks(ranks, implementation):
    ranks.run(3, no_sync_then_synchronise, implementation)
