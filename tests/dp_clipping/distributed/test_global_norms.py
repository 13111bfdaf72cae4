"""Squared norms of the global batch: the same vector on every rank."""

import pytest
import torch

from dp_clipping.distributed.global_norms import GlobalNorms
from dp_clipping.distributed.norm_reduce import NormReducer
from tests.support.on_ranks import on_ranks


def exchanged(context, sizes: tuple[int, int]) -> list[list[float]]:
    reducer = NormReducer(data_parallel_group=context.group, dtype=torch.float64)
    mine = torch.arange(2.0 * sizes[context.rank]).view(2, -1) + 10 * (context.rank + 1)
    found = GlobalNorms(reducer, mine)
    assert found.sizes == list(sizes)
    assert torch.equal(found.wait(), found.wait())
    return found.wait().tolist()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3, 0), [[10.0, 11.0, 12.0], [13.0, 14.0, 15.0]]),
        ((1, 2), [[10.0, 20.0, 21.0], [11.0, 22.0, 23.0]]),
    ],
    ids=str,
)
def test_every_rank_has_all_samples_in_order_of_ranks(cpu_ranks, sizes, expected):
    assert cpu_ranks.run(2, exchanged, sizes) == [expected] * 2


@on_ranks(2)
def test_a_tensor_axis(context) -> None:
    """Ranks of a tensor axis hold the same samples: one slot each, not one per rank."""
    reducer = NormReducer(tensor_group=context.group, dtype=torch.float64)
    found = GlobalNorms(reducer, torch.ones(1, 4)).wait()
    assert found.tolist() == [[1.0] * 4]
    with pytest.raises(RuntimeError, match="have different numbers of samples"):
        GlobalNorms(reducer, torch.ones(1, 4 + context.rank))


def test_one_process():
    found = GlobalNorms(NormReducer(), torch.ones(2, 3))
    assert found.sizes == [3]
    assert torch.equal(found.wait(), torch.ones(2, 3))
