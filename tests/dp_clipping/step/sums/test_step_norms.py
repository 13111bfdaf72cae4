"""The norms of a step whose parameters are split: what this rank adds, in each way of exchange."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.distributed.norm_reduce import PARAMETERS_PER_PARTIAL_SUM, NormReducer
from dp_clipping.profiling.profile import Timer
from dp_clipping.step.sums.step_norms import StepNorms
from tests.dp_clipping.conftest import trained

BATCH, GROUPS, COUNT = 3, 2, PARAMETERS_PER_PARTIAL_SUM + 4  # two partial sums


@pytest.mark.parametrize("mode", ["sync", "async", "layerwise"])
def test_norms_of_split_parameters_are_exchanged(mode):
    """Other ranks have nothing to add, so that all is this rank's part."""
    records = [trained(Parameter(torch.zeros(2)), group=n % GROUPS) for n in range(COUNT)]
    reducer = NormReducer(mode=mode)
    reducer.splits_parameters = True
    split = SimpleNamespace(parts={r.parameter: SimpleNamespace(split=True) for r in records})
    members = [records[k::GROUPS] for k in range(GROUPS)]
    capture = SimpleNamespace(trained=records, members=members, trigger=torch.zeros(()))
    context = SimpleNamespace(capture=capture, reducer=reducer, timer=Timer(None), sharding=split)
    for _ in range(2):  # the second step begins anew
        norms = StepNorms(context, BATCH)
        squares = torch.rand(COUNT, BATCH)
        expected = torch.stack([squares[k::GROUPS].sum(0) for k in range(GROUPS)])
        assert norms.own_squares() is None
        norms.table.add_rows(records, squares)
        norms.launch()
        for found in (*norms.squares_and_bounds(), norms.own_squares()):
            torch.testing.assert_close(found, expected)
