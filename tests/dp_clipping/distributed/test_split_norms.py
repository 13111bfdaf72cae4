"""Norms of whole samples from what each rank of a tensor axis knows."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.clipping.norms import Norm, Norms
from dp_clipping.distributed.norm_reduce import NormReducer, SplitNorms
from dp_clipping.distributed.sharding import ParameterPart
from tests.dp_clipping.conftest import trained
from tests.support.on_ranks import on_ranks


@on_ranks(3)
def test_no_sample_is_kept_where_ranks_differ(context) -> None:
    """Two of three ranks agree on the norms of a parameter that they share."""
    shared = trained(Parameter(torch.zeros(2)))
    parts = {shared.parameter: ParameterPart(torch.Size([2]))}
    reducer = NormReducer(tensor_group=context.group)
    for added, differ in ((0.0, False), (float(context.rank == 2), True)):
        found, norms = SplitNorms(reducer, SimpleNamespace(parts=parts)), Norms(1, torch.zeros(2))
        norms.add(shared, Norm(torch.tensor([4.0 + added, 4.0])))
        _, bounds = found.unpack(reducer.reduce(found.table(norms, [shared])).wait())
        assert bounds.isinf()[0, 0] == differ


@on_ranks(2)
def test_ranks_may_take_norms_of_a_parameter_in_different_ways(context) -> None:
    """One multiplies Gram matrices where the other forms G, as memory decides on each."""
    shared, other = trained(Parameter(torch.zeros(2)), "a"), trained(Parameter(torch.zeros(2)), "b")
    other.number = 1
    parts = {one.parameter: ParameterPart(torch.Size([2])) for one in (shared, other)}
    reducer = NormReducer(tensor_group=context.group)
    for added, message in ((0.0, None), (float(context.rank), "^a parameter: not split")):
        found, norms = SplitNorms(reducer, SimpleNamespace(parts=parts)), Norms(1, torch.zeros(2))
        squared = torch.tensor([4.0 + added, 4.0])
        gram = Norm(squared, torch.tensor([9.0, 9.0]), 2.0**-16, 2.0**-24)
        norms.add(shared, gram if context.rank else Norm(squared))
        norms.add(other, Norm(torch.ones(2)))
        with nullcontext() if message is None else pytest.raises(RuntimeError, match=message):
            found.refuse_differences(norms, [shared, other])
