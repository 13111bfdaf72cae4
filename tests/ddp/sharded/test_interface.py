"""Norms, pieces and whole gradients of a sharded network are those of one process."""

import torch

from lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss, small_buckets


def clipped(context: Context, name: str) -> None:
    for max_norm in (0.1, 1e9):
        pair = Beside(context, name, Chain(), **small_buckets(name))
        pair.backward(chain_loss(0))
        pair.finish()
        expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), max_norm)
        torch.testing.assert_close(pair.model.clip_grad_norm_(max_norm), expected)
        pair.compare()


def test_clipping_takes_the_norm_over_all_ranks(cpu_ranks):
    for world_size, name in ((3, "zero1"), (2, "zero2")):
        cpu_ranks.run(world_size, clipped, name)


def pieces(context: Context) -> None:
    """They tile the gradient over ranks, and the optimizer uses what is written to them."""
    pair = Beside(context, "zero2", Chain(), **small_buckets("zero2"))
    assert pair.model.gradient_pieces() == []
    pair.backward(chain_loss(0))
    pair.finish()
    reference = dict(zip(pair.model.parameters(), pair.reference.parameters(), strict=True))
    place = {p: i for i, p in enumerate(reference)}
    owned = torch.zeros(len(reference))
    for parameter, offset, numel, gradient in pair.model.gradient_pieces():
        part = reference[parameter].grad.flatten()[offset : offset + numel]
        torch.testing.assert_close(gradient, part)
        owned[place[parameter]] += numel
        gradient.add_(1)  # as noise
    torch.distributed.all_reduce(owned, group=context.group)
    assert owned.tolist() == [p.numel() for p in reference]
    pair.model.make_optimizer(torch.optim.SGD, lr=0.1).step()
    for p, q in reference.items():
        torch.testing.assert_close(p, q - 0.1 * (q.grad + 1))


def test_pieces_are_what_the_optimizer_uses(cpu_ranks):
    cpu_ranks.run(3, pieces)
