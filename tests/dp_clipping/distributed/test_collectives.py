"""Sums of several tensors in one launch."""

import torch

from dp_clipping.torch_compat import all_reduce_together, reduce_scatter_together
from tests.support.on_ranks import on_ranks


@on_ranks(2)
def test_reduce_scatter(context) -> None:
    """Each rank keeps the rows of its number of the sums."""
    ones, rank = torch.ones(4, 2), context.rank
    inputs = [(rank + 1) * torch.arange(8.0).view(4, 2), (rank + 1) * ones]
    outputs = [torch.full((2, 2), torch.nan) for _ in inputs]
    reduce_scatter_together(outputs, inputs, context.group).wait()
    assert torch.equal(outputs[0], 3 * torch.arange(8.0).view(4, 2)[2 * rank : 2 * rank + 2])
    assert torch.equal(outputs[1], 3 * ones[:2])


@on_ranks(2)
def test_all_reduce(context) -> None:
    tensors = [torch.full((n,), float(context.rank + 1)) for n in (1, 3)]
    all_reduce_together(tensors, context.group).wait()
    assert [x.tolist() for x in tensors] == [[3.0], [3.0] * 3]
