"""Blocks are called in one order."""

from types import SimpleNamespace

import pytest

from ddp.internals.ranks import told_by_all
from ddp.sharded.internals.agreement import agree
from ddp.sharded.internals.blocks import Agree, CallOrder
from ddp_by_hand.lm.rank_pool import Context

BLOCKS = [SimpleNamespace(name=f"blocks.{i}") for i in range(3)]


def of_ranks(context: Context) -> Agree:
    return lambda act, differ: agree(lambda x: told_by_all(x, context.group), act, differ=differ)


def forward(order: CallOrder, agree: Agree, *numbers: int) -> None:
    order.begin()
    for i in numbers:
        order.call(BLOCKS[i], agree)
    order.end(agree)


def one_order(context: Context) -> None:
    order, agree = CallOrder(), of_ranks(context)
    forward(order, agree, 0, 2, 0)
    forward(order, agree, 0, 2, 0)
    order.begin()
    order.call(BLOCKS[0], agree)
    assert order.next_block() is BLOCKS[2]
    with pytest.raises(RuntimeError, match=r"blocks\.1 is called where .* blocks\.2 was"):
        order.call(BLOCKS[1], agree)
    with pytest.raises(RuntimeError, match=r"blocks\.1 is called where .* the forward ended"):
        forward(order, agree, 0, 2, 0, 1)
    with pytest.raises(RuntimeError, match=r"has not called blocks\.2, blocks\.0"):
        forward(order, agree, 0)
    forward(order, agree, 0, 2, 0)


def another_order_on_each_rank(context: Context) -> None:
    with pytest.raises(RuntimeError, match=r"blocks\.0 on rank 0, blocks\.1 on rank 1"):
        forward(CallOrder(), of_ranks(context), context.rank, 1 - context.rank)


@pytest.mark.parametrize("body", [one_order, another_order_on_each_rank])
def test_order(cpu_ranks, body):
    cpu_ranks.run(2, body)
