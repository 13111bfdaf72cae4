"""Norms of whole samples from what each rank of a tensor axis knows."""

from types import SimpleNamespace

import torch
from torch.nn import Parameter

from dp_clipping.clipping.norms import Norm, Norms
from dp_clipping.distributed.norm_reduce import NormReducer
from dp_clipping.distributed.sharding import ParameterPart
from dp_clipping.distributed.split_norms import SplitNorms
from tests.dp_clipping.conftest import trained
from tests.support.on_ranks import on_ranks

SPLIT, SHARED = TRAINED = [trained(Parameter(torch.zeros(2))) for _ in range(2)]
PARTS = {
    SPLIT.parameter: ParameterPart(torch.Size([2]), split=True),
    SHARED.parameter: ParameterPart(torch.Size([2])),
}
SHARDING = SimpleNamespace(parts=PARTS)


def norms_of(split: float, shared: float) -> Norms:
    norms = Norms(1, torch.zeros(2))
    norms.add(SPLIT, Norm(torch.tensor([split, 2 * split])))
    norms.add(SHARED, Norm(torch.tensor([shared, shared])))
    return norms


def summed(context, shared: float):
    reducer = NormReducer(tensor_group=context.group)
    found = SplitNorms(reducer, SHARDING)
    assert found.is_split
    table = found.table(norms_of(1.0 + context.rank, shared), TRAINED)
    squares, bounds = found.unpack(reducer.reduce(table).wait())
    return found, squares, bounds


@on_ranks(2)
def test_shared_parameters_count_once_and_must_agree(context) -> None:
    found, squares, bounds = summed(context, 4.0)
    torch.testing.assert_close(squares, torch.tensor([[7.0, 10.0]]))
    torch.testing.assert_close(bounds, squares)
    assert not found.differ

    found, _, bounds = summed(context, 4.0 + context.rank)
    assert found.differ
    assert bounds.isinf().all()


@on_ranks(3)
def test_three_ranks_of_which_two_agree(context) -> None:
    found, _, bounds = summed(context, 4.0 + (context.rank == 2))
    assert found.differ
    assert bounds.isinf().all()


def test_a_rank_alone_has_whole_norms():
    found = SplitNorms(NormReducer(), None)
    assert not found.is_split
    assert found.table(norms_of(1.0, 4.0), TRAINED)[0].tolist() == [[5.0, 6.0]]
